"""One file per mode of `oracle run`: each runs a real entry point and writes its receipts."""
