"""Checkouts as one overlay mount each, over the layers of a template."""
