"""The canary: while the engine works, somebody else asks the device for a trifle, and must get it in time."""
