"""What changed in a checkout as git's objects, beside the mirror. Sync; runs in workers."""

from collections.abc import Callable
from pathlib import Path

from ...git.objects.trees import ScratchObjects, make_repository
from ...host.files import full_disk_named
from .collect import collect
from .worktree import PatchJob, open_worktree


def write_repository(
    job: PatchJob, list_changed: Callable[[], list[bytes]], plain: str, repository: Path
) -> str:
    """The tree that `git add --all` would record of a checkout, whose objects are in the new
    `repository`, or borrowed. Without changes of the tree `plain`, nothing is written.
    """
    with open_worktree(job) as worktree:
        changes = collect(worktree, list_changed())
        if not changes and job.tree == plain:
            return plain
        with full_disk_named("the changes of a layer"):
            objects = ScratchObjects(repository / "objects")
            edits = {
                path: None if mode is None else (mode, objects.write_blob(data))
                for path, mode, data, _ in changes
            }
            make_repository(repository, borrows_from=job.mirror)
            return objects.write_tree(worktree.base, edits)
