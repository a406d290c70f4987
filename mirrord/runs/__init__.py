"""Runs over many instances: predictions that are graded, instances that are rehearsed, reports."""
