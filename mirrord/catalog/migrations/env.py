"""Alembic's entry: all missing migrations on a given connection, in the caller's transaction."""

from alembic import context

from mirrord.catalog.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite alters no column: alembic copies the table
    render_as_batch=True,
    # the caller has begun the transaction, in which all of it happens or nothing
    transactional_ddl=False,
)
context.run_migrations()
