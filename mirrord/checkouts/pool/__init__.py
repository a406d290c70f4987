"""Checkouts as plain trees, brought to a commit in place and proven by a manifest."""
