"""Mirrors as single files."""
