"""Heals: mirrors are repaired object by object from donors; the mirror changes last."""
