"""Turns, shared work, and the worker processes."""
