"""The check of the catalog: whether it can be read, and whether it knows what the mirrors know.

Pins are refs in the mirrors, so a catalog that is lost or older than they shows: it lacks mirrors, or what their pins are for.
Reads both as they lie on disk, and says how to make the catalog again. An import that runs now looks the same until it ends.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from ..config import Settings
from ..errors import MirrordError
from ..git.command import run_git_sync
from ..model import MirrorName
from .asking import Result, entries, judge

_REBUILD = (
    "start the daemon: it adopts mirrors and pins, and imports the files in datasets/ again; add mirrors again that had a URL of"
    " their own, and import other dataset files by hand"
)
_PINS = "refs/mirrord/pins/"
_DATASET = "dataset/"
_RECORDED = (
    "SELECT 'dataset/' || datasets.name, mirror_key, commit_id FROM recorded_commits"
    " JOIN datasets ON datasets.id = recorded_commits.dataset_id"
)

Pins = set[tuple[str, str, str]]
"""Owner, mirror key, commit."""


def catalog(settings: Settings) -> Result:
    """The catalog can be made again from what the mirrors hold; the daemon does most of it when it starts."""
    mirrors = settings.state_dir / "mirrors"
    names = [entry.name for entry in entries(mirrors)]
    path = settings.state_dir / "catalog.sqlite3"
    if not path.exists() or not path.stat().st_size:
        return judge(
            not names, f"there is none, and {len(names)} mirrors", _remedy(_pinned(mirrors, names))
        )
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            known = {row[0].lower() for row in connection.execute("SELECT name FROM mirrors")}
            recorded: Pins = {*connection.execute(_RECORDED)}
            recorded |= {
                *connection.execute(
                    "SELECT owner, mirror_key, commit_id FROM pins WHERE owner NOT LIKE 'dataset/%'"
                )
            }
    except sqlite3.DatabaseError as error:
        said = str(error)
    if said != "ok":
        remedy = f"stop the daemon, move {path}* away, start it again; then: {_remedy(_pinned(mirrors, names))}"
        return "fail", f"it is damaged: {said}", remedy
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        fact = f"{len(known)} mirrors, {len(unknown)} on disk that it does not know"
        return "warn", fact, _remedy(_pinned(mirrors, names) - recorded)
    return _held_against(_pinned(mirrors, names) - recorded, len(known))


def _held_against(missing: Pins, known: int) -> Result:
    """Judge what the mirrors' pins say and the catalog does not."""
    if not missing:
        return "ok", f"{known} mirrors; it knows what each pin is for", ""
    counts = Counter(owner for owner, _, _ in missing)
    listed = ", ".join(
        f"{count} of {owner.removeprefix(_DATASET)}" for owner, count in sorted(counts.items())
    )
    fact = f"it is older than the mirrors, or was lost: they pin commits that it does not record, {listed}"
    return "warn", fact, _remedy(missing)


def _remedy(missing: Pins) -> str:
    """How to make it again, with the datasets by name."""
    names = sorted(
        {owner.removeprefix(_DATASET) for owner, _, _ in missing if owner.startswith(_DATASET)}
    )
    if not names:
        return _REBUILD
    imports = "; ".join(f"mirrord dataset import FILE --name {name}" for name in names)
    return (
        f"{_REBUILD}: {imports}. Until then their pins stay; a bundle of a mirror has its rows too"
    )


def _pinned(mirrors: Path, names: list[str]) -> Pins:
    """What the mirrors have; one that git cannot read is the audit's to tell."""
    found: Pins = set()
    for name in names:
        try:
            key = MirrorName.parse(name).key
            refs = run_git_sync(
                "for-each-ref",
                "--format=%(refname)",
                _PINS,
                git_dir=mirrors / name,
                doing="list pins",
            ).lines
        except MirrordError:
            continue
        parts = (ref.removeprefix(_PINS).rpartition("/") for ref in refs)
        found |= {(owner, key, commit) for owner, _, commit in parts}
    return found
