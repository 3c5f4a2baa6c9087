"""Receipts from other engines on the same checkpoint. `engine.py` says what one has to offer; each is one file."""
