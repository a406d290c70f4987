"""git on a damaged repository, without what can hide that objects are missing."""

import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ..git.batch import BatchObject, read_objects_sync
from ..git.command import GitResult, run_git_sync
from ..git.configuration import UNTRUSTING
from .defects import TIMEOUT

OBJECT_ID = re.compile(r"\b[0-9a-f]{40}\b")

read_objects = partial(read_objects_sync, options=UNTRUSTING, timeout=TIMEOUT, bisect=True)


def run_git(git_dir: Path, doing: str, *args: str, **more: Any) -> GitResult:
    """Call `run_git_sync` without the files that can hide missing objects."""
    return run_git_sync(*UNTRUSTING, *args, git_dir=git_dir, timeout=TIMEOUT, doing=doing, **more)


def look_up(
    git_dir: Path, names: Iterable[str], read: Collection[str] = ()
) -> dict[str, BatchObject]:
    """Look up the objects of `names`, and of `read` with their bytes; leave out missing ones."""
    objects = read_objects(git_dir, read, info=sorted(set(names)), doing="look up objects")
    return {one.name: one for one in objects if one.exists}


def object_kinds(git_dir: Path, oids: Iterable[str]) -> dict[str, str]:
    """Return the type of each object; empty where it is missing or unreadable."""
    objects = look_up(git_dir, asked := set(oids))
    return {oid: objects[oid].kind if oid in objects else "" for oid in asked}
