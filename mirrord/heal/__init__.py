"""Heals: mirrors are repaired object by object, from any donor, nothing destroyed first."""
