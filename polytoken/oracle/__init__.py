"""Proof that an engine is right: receipts of real runs, comparison of two receipts, a gate, a canary.

    plan -> subject (the loaded model) -> a mode -> receipts (JSON lines)

A receipt is a file of JSON objects, one a line: the first says who wrote it and on what, the last how it ended, and
those between hold tokens, counts and fingerprints of numbers. `schema/receipt.schema.json` describes them all; anybody
may write one.
"""
