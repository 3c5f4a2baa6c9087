"""The MTP lane: a window of drafts is verified by one forward, and its accepted prefix becomes permanent.

One cycle of a row, with the symbols of `sampling.acceptance`: the primary x_0 is emitted but not yet forwarded; a
drafter (`draft`) proposes x_1 .. x_d; the trunk runs [x_0 .. x_d] once (`cycle`); the first a drafts are accepted, and
one more token is emitted, the next primary; trunk state and drafter go back to x_0 .. x_a. How many drafts a cycle asks
for is the business of `depth`. The drafter can be wrong, stale or hostile: that costs speed and changes no law.
"""
