# Generated from ../asynchronous/__init__.py by tests/unasync.py: edit that file, then run it.
"""The client for threads, generated from the one for asyncio by tests/unasync.py."""
