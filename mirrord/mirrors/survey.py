"""The check of every mirror when the daemon starts, in a worker."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..model import CommitId
from ..presence import exists
from . import maintenance
from .pinrefs import read_pins
from .refs import JOURNAL
from .repository import INCOMING, read_refs_of

SURVEY_BATCH = 100  # mirrors in one call of a worker

# owner and commit of each pin of a mirror
OwnedCommits = set[tuple[str, CommitId]]


def survey(git_dirs: Sequence[Path]) -> list[OwnedCommits | None]:
    """Read the pins of mirrors; None for one that a crash interrupted, or that git has to judge."""
    commits: list[OwnedCommits | None] = [None] * len(git_dirs)
    for number, git_dir in enumerate(git_dirs):
        with suppress(OSError):
            packs, indexes = maintenance.packs_and_indexes(git_dir / "objects/pack")
            is_interrupted = packs != indexes or exists(git_dir / JOURNAL)
            if is_interrupted or next(maintenance.iter_temporary_files(git_dir), None):
                continue
            refs = read_refs_of(git_dir)
            if refs is not None and not any(ref.startswith(INCOMING) for ref in refs):
                commits[number] = set(read_pins(refs))
    return commits
