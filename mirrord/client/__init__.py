"""The client: the daemon's socket as a typed Python object.

`_async` is written by hand; tests/support/unasync.py generates `_sync` from it, and a test holds
the two equal. Imports nothing but the standard library. Holds no state that a crash could lose: a
lease outlives its client until its deadline.
"""
