"""Objects of a history that git's fsck refuses: the commits that have them, recorded ones by name.

Such a history is mirrored as it is; a finding says whose trees cannot be served for it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ..git.fsck import RULES, Blemish, Severity
from ..model import CommitId, FindingKind
from .defects import Defect
from .reading import look_up, run_git

# they are arguments of one git, of which Linux takes 2 MiB
_TRACED = 10_000


def judge_blemishes(
    git_dir: Path, blemishes: Iterable[Blemish], commits: Collection[CommitId]
) -> dict[str, Defect]:
    """Return a defect for each object, with those of `commits` whose own tree has it."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    harmful = set[str]()
    for blemish in blemishes:
        reasons[blemish.oid].append(str(blemish))
        if RULES.get(blemish.rule) is not Severity.UNPROVABLE:
            harmful.add(blemish.oid)
    traced = sorted(reasons)[:_TRACED]
    since, places = _trace(git_dir, traced)
    owned = _owned(git_dir, places, commits)
    return {
        oid: Defect(
            FindingKind.REFUSED,
            "; ".join([*reasons[oid], *_history(since.get(oid, ()), owned.get(oid, ()))]),
            tuple(sorted(owned.get(oid, ()))),
        )
        for oid in reasons
        if oid in owned or oid in harmful
    }


def _history(since: Collection[str], owned: Collection[str]) -> list[str]:
    """Describe where an object is."""
    said = []
    if since:
        more = f" and {len(since) - 1} more add or remove it" if len(since) > 1 else " has it"
        said.append(f"commit {[*since][-1]}{more}")  # the oldest
    count = len(owned)
    said.append(f"the tree of {count or 'no'} recorded commit{'s' * (count != 1)} has it")
    return said


def _trace(
    git_dir: Path, oids: Collection[str]
) -> tuple[Mapping[str, list[str]], dict[str, set[str]]]:
    """Return the commits that add or remove each object, newest first, and its paths."""
    since: defaultdict[str, list[str]] = defaultdict(list)
    places: defaultdict[str, set[str]] = defaultdict(set)
    finds = (f"--find-object={oid}" for oid in oids)
    listing = run_git(
        git_dir, "look for the commits with an object",
        # -m: log shows no differences of merges without it; -t: fsck refuses trees, too
        # quotePath: bytes above 127 in names would be printed in octal
        "-c", "core.quotePath=false", "log", "--all", "--format=commit %H %T", "-m", "-t", "--raw",
        "--no-abbrev", "--no-renames", *finds,
    ) if oids else None  # fmt: skip
    commit = ""
    for line in listing.lines if listing else ():
        if line.startswith("commit "):
            _, commit, _ = line.split(" ")
        elif line.startswith(":"):
            columns, _, path = line.partition("\t")
            _, _, old, new, _ = columns.split(" ")
            for oid in {old, new}.intersection(oids):
                if commit not in since[oid]:
                    since[oid].append(commit)
                if not path.startswith('"'):  # a line feed in it, as no look-up can name
                    places[oid].add(path)
    roots = run_git(
        git_dir, "list the trees of commits", "rev-list", "--all", "--no-commit-header",
        "--format=%H %T",
    ).lines if oids else []  # fmt: skip
    for commit, tree in (line.split(" ") for line in roots if line):
        if tree in oids:
            since[tree].append(commit)
            places[tree].add("")
    return since, places


def _owned(
    git_dir: Path, places: Mapping[str, Collection[str]], commits: Collection[CommitId]
) -> dict[str, set[CommitId]]:
    """Return the commits whose own tree has an object, at one of its paths in the history."""
    paths = sorted({path for group in places.values() for path in group})
    names = {
        f"{oid}:{path}" if path else f"{oid}^{{tree}}": oid for oid in commits for path in paths
    }
    owned: defaultdict[str, set[CommitId]] = defaultdict(set)
    for name, entry in look_up(git_dir, names).items():
        if entry.oid in places:
            owned[entry.oid].add(names[name])
    return owned
