"""The client for threads, generated from the one for asyncio by tests/unasync.py."""
