"""The client of a daemon, for asyncio and for threads.

`_async` is written by hand; tests/support/unasync.py generates `_sync` from it, and a test holds
the two equal. Imports only the standard library. A crash loses nothing: a lease outlives its client
until its deadline.
"""
