"""What a start has to know of every mirror, read without git and without changing anything.

A thousand mirrors take about a second; only those in which something is unfinished, or is not what
the catalog knows, need more.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..model import CommitId
from .fetch import INCOMING
from .maintenance import iter_doubtful_files, packs_and_indexes
from .pins import read_pins
from .repository import read_refs_of
from .transaction import JOURNAL

OwnedCommits = set[tuple[str, CommitId]]
"""Owner and commit of each pin of a mirror."""


def survey(git_dirs: Sequence[Path]) -> list[OwnedCommits | None]:
    """The pins of each mirror; None where a crash left something, or git has to look."""
    found: list[OwnedCommits | None] = [None] * len(git_dirs)
    for number, git_dir in enumerate(git_dirs):
        with suppress(OSError):
            found[number] = _survey(git_dir)
    return found


def _survey(git_dir: Path) -> OwnedCommits | None:
    packs, indexes = packs_and_indexes(git_dir / "objects/pack")
    is_unfinished = packs != indexes or (git_dir / JOURNAL).exists()
    if is_unfinished or next(iter_doubtful_files(git_dir), None):
        return None
    refs = read_refs_of(git_dir)
    if refs is None or any(ref.startswith(INCOMING) for ref in refs):
        return None
    return set(read_pins(refs))
