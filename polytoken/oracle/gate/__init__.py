"""The gate: one command that says of a user's own machine and checkpoint whether what is promised equal is equal."""
