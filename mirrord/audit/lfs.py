"""LFS objects of a mirror: those that it should have, compared with their sizes and sha256."""

from collections.abc import Collection
from pathlib import Path

from ..git.lfs import OBJECTS, find_fault, object_path, read_records
from ..git.objects.modules import read_needs
from ..model import AuditLevel, CommitId, FindingKind
from ..presence import is_dir
from .defects import Defect


def find_bad_objects(
    git_dir: Path, commits: Collection[CommitId], level: AuditLevel
) -> dict[str, Defect]:
    """Find objects that are gone or damaged, each with the commits whose trees have it.

    `content` reads them all, the other levels compare sizes.
    """
    if not is_dir((git_dir / OBJECTS).parent):
        return {}
    faults = {
        record.pointer.oid: fault
        for record in read_records(git_dir)
        if (fault := find_fault(
            object_path(git_dir, record.pointer.oid), record.pointer,
            reads=level is AuditLevel.CONTENT,
        ))
    }  # fmt: skip
    if not faults:
        return {}
    needs = read_needs(git_dir, commits)
    return {
        f"{OBJECTS}/{oid}": Defect(
            FindingKind.OBJECT,
            fault,
            tuple(
                commit
                for commit in commits
                if any(pointer.oid == oid for pointer in needs[commit].objects)
            ),
        )
        for oid, fault in faults.items()
    }
