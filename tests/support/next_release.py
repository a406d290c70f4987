"""The release after this one: a copy of the package whose catalog has one more revision."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import mirrord
from mirrord.catalog.database import MIGRATIONS
from mirrord.catalog.schema import HEAD

NEXT = f"{int(HEAD) + 1:04}"

_REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{number}", "{before}"


def upgrade() -> None:
    op.add_column("instances", sa.Column("note_{number}", sa.Text))
    op.execute("UPDATE instances SET note_{number} = id")
    op.create_index("instances_by_note_{number}", "instances", ["note_{number}"])
"""


def add_revisions(migrations: Path, numbers: Iterable[int]) -> None:
    """Add revisions, each after the one before, to a directory of migrations."""
    for number in numbers:
        text = _REVISION.format(number=f"{number:04}", before=f"{number - 1:04}")
        (migrations / "versions" / f"{number:04}_next.py").write_text(text)


@functools.cache
def next_release() -> Path:
    """Return the directory to put in front of the module search path; it is gone at the end."""
    root = Path(tempfile.mkdtemp(prefix="mirrord-next-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    package = Path(mirrord.__file__).parent
    copy = root / package.name
    shutil.copytree(package, copy)
    add_revisions(copy / MIGRATIONS.relative_to(package), [int(NEXT)])
    schema = copy / "catalog/schema.py"
    text = schema.read_text()
    assert text.count(f'HEAD = "{HEAD}"') == 1
    schema.write_text(text.replace(f'HEAD = "{HEAD}"', f'HEAD = "{NEXT}"'))
    root.chmod(0o755)
    return root
