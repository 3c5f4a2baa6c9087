"""The disk tier of the state bank: records that outlive the process, in one bounded folder."""
