"""The client: the daemon's socket as a typed Python object, in two colours.

`asynchronous` is written by hand; `synchronous` is generated from it by `tests/unasync.py`, and a
test holds the two equal. Imports nothing of the daemon and nothing but the standard library. RefCounts
no state that a crash could lose: a lease outlives its client until its deadline.
"""
