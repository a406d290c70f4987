"""What alembic runs: all missing migrations on the connection it was given, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from mirrord.catalog.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,
)
context.run_migrations()
