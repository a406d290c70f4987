"""Alembic's migrations of the catalog, inside the package so that an installed mirrord has them."""
