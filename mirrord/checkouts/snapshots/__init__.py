"""Layers: what a fork, a snapshot or a grade has over its base commit."""
