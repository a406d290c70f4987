"""Sealed stores: the .git directory of a checkout, built from closure packs that stores share."""
