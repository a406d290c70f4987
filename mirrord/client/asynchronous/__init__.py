"""The client for asyncio, written by hand."""
