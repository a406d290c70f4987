"""Verification of seals: finds what is reachable beyond a commit and its history."""
