"""Datasets: files read, rows normalised, commits mirrored and pinned."""
