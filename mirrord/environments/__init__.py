"""Environments: the recipes that they are built from, and the builds."""
