"""Diffs and patches."""
