"""Checks of the catalog and the store of a fleet."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from ..config import Settings
from ..errors import MirrordError
from ..git.command import run_git_sync
from ..model import MirrorName
from ..places import how_to_get
from ..presence import exists
from .checks import Result, entries, judge

_RECORDED = (
    "SELECT 'dataset/' || datasets.name, mirror_key, commit_id FROM recorded_commits"
    " JOIN datasets ON datasets.id = recorded_commits.dataset_id UNION"
    " SELECT owner, mirror_key, commit_id FROM pins WHERE owner NOT LIKE 'dataset/%'"
)


def catalog(settings: Settings) -> Result:
    """Check that it can be read, and that it records all mirrors and pins on disk.

    Pins are refs of mirrors: a lost or older catalog lacks mirrors, or owners of pins. A running
    import looks the same until it ends.
    """
    if settings.catalog.url:
        return _shared_catalog(settings.catalog.url)
    path, mirrors = settings.state_dir / "catalog.sqlite3", settings.state_dir / "mirrors"
    names = [entry.name for entry in entries(mirrors)]
    missing = _read_pins(mirrors, names)
    if not exists(path) or not path.stat().st_size:
        fact = f"it does not exist, but {len(names)} mirrors do" if names else "none yet"
        return judge(not names, fact, _remedy(missing))
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            # the first fault is enough; integrity_check would compare indexes too, for longer
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            recorded = {row[0].lower() for row in connection.execute("SELECT name FROM mirrors")}
            missing -= set(connection.execute(_RECORDED))
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict != "ok":
        remedy = f"stop the daemon and move {path}* away; then {_remedy(missing)}"
        return "fail", f"it is damaged: {verdict}", remedy
    if unknown := [name for name in names if name.lower() not in recorded]:
        fact = f"{len(recorded)} mirrors, but {len(unknown)} on disk are not recorded"
        return "warn", fact, _remedy(missing)
    if not missing:
        return "ok", f"{len(recorded)} mirrors; all pins are recorded", ""
    counts = sorted(Counter(owner.removeprefix("dataset/") for owner, _, _ in missing).items())
    listed = ", ".join(f"{count} of {owner}" for owner, count in counts)
    fact = f"lost, or older than the mirrors: pinned commits are not recorded, {listed}"
    return "warn", fact, _remedy(missing)


def _shared_catalog(url: str) -> Result:
    """Check that PostgreSQL answers, without the daemon's systemd credentials."""
    from ..catalog import database  # noqa: PLC0415  (takes 0.2 s to load)

    try:
        revision = database.read_revision(url)
    except MirrordError as error:
        return "fail", error.message, error.hint or ""
    if revision is None:
        return "ok", "the database is empty; the first daemon creates the tables", ""
    return "ok", f"PostgreSQL answers; its schema is {revision}", ""


def store(settings: Settings) -> Result:
    """Check that the fleet's store answers and supports conditional writes."""
    if not settings.store.url:
        return "ok", "none is configured", ""
    try:
        from ..fleet.objects import ObjectStore  # noqa: PLC0415  (an extra; takes 0.1 s to load)

        ObjectStore(settings.store.url).check()
    except ImportError:
        return "fail", "obstore is not installed", how_to_get("fleet")
    except MirrordError as error:
        return "fail", error.message, error.hint or ""
    return "ok", f"{settings.store.url} answers, with conditional writes", ""


_REBUILD = (
    "start the daemon: it adopts mirrors and pins, and imports the files in datasets/ again; add"
    " mirrors with other URLs again, and import other dataset files by hand"
)


def _remedy(missing: set[tuple[str, str, str]]) -> str:
    owners = sorted({owner for owner, _, _ in missing if owner.startswith("dataset/")})
    if not owners:
        return _REBUILD
    imports = [f"mirrord dataset import FILE --name {owner.partition('/')[2]}" for owner in owners]
    fact = "Until then their pins stay; a bundle of a mirror also has its rows"
    return f"{_REBUILD}: {'; '.join(imports)}. {fact}"


def _read_pins(mirrors: Path, names: list[str]) -> set[tuple[str, str, str]]:
    """Return owner, mirror key and commit of each pin; mirrors that git cannot read are skipped."""
    pins = set()
    for name in names:
        try:
            key = MirrorName.parse(name).key
            arguments = "for-each-ref", "--format=%(refname:lstrip=3)", "refs/mirrord/pins/"
            refs = run_git_sync(*arguments, git_dir=mirrors / name, doing="list pins").lines
        except MirrordError:
            continue
        parts = (ref.rpartition("/") for ref in refs)
        pins |= {(owner, key, commit) for owner, _, commit in parts}
    return pins
