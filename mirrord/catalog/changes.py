"""The changes that the daemons of a fleet tell each other, by topic, on one connection."""

from sqlalchemy import Connection, or_, select

from .database import insert_of, upsert
from .schema import changes

# prefix of a mirror's key in the key of its claim, and in the topic of its changes
MIRROR = "mirror/"

# topic: the database was restored from a backup
RESTORED = "restored"

_CLOCK = ""

_RESTORED_STEP = 1_000_000  # more versions than the lost state can have had since `seen`


def note_changes(connection: Connection, *topics: str) -> None:
    """Publish changes to the fleet. Must be the last statements of a transaction.

    They lock the clock's row until it ends, so versions become visible in order: a reader of one
    version has all before it.
    """
    if connection.dialect.name == "sqlite":
        return  # no other daemon uses it
    row = {"topic": _CLOCK, "version": 1}
    statement = insert_of(connection, changes).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=["topic"], set_={"version": changes.c.version + 1}
    )
    version = connection.execute(statement.returning(changes.c.version)).scalar_one()
    upsert(connection, changes, [{"topic": topic, "version": version} for topic in sorted(topics)])


def list_changes(connection: Connection, since: int) -> tuple[int, list[str]]:
    """Return the current version, and the topics that changed after `since`, in order.

    A version below `since` means that the database was restored from a backup.
    """
    # a clock that never moved, as in a new database, is below any version that a daemon has seen
    none = since if connection.dialect.name == "sqlite" else min(since, 0)
    is_new = or_(changes.c.version > since, changes.c.topic == _CLOCK)
    query = select(changes.c.topic, changes.c.version).where(is_new).order_by(changes.c.version)
    rows = connection.execute(query).all()
    version = next((row.version for row in rows if row.topic == _CLOCK), none)
    return version, [row.topic for row in rows if row.topic]


def note_restored(connection: Connection, seen: int) -> None:
    """Publish once that the database was restored to a state before version `seen`."""
    row = {"topic": _CLOCK, "version": seen + _RESTORED_STEP}
    statement = insert_of(connection, changes).values(row)
    statement = statement.on_conflict_do_update(
        index_elements=["topic"], set_=row, where=changes.c.version < seen
    )
    if connection.execute(statement.returning(changes.c.version)).first():
        note_changes(connection, RESTORED)
