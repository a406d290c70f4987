"""Diff, apply and restore in the tree of a checkout."""
