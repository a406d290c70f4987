"""Repositories of images as upstreams, for rows that name an image and no repository. In workers.

The upstream is a directory of links to the objects in the image. A mirror follows it like any other
upstream, so its objects are checked, and what is later than the image's HEAD is known as such.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import InvalidImageError
from ...git.command import run_git_sync
from ...host.files import exchange
from ...host.trash import remove_tree
from ...model import FROM_IMAGE_HEAD
from ...presence import exists
from .tree_layers import directory_in, take_repository


def find_repository(image: dict[str, Any]) -> str:
    """Return the directory of an image's only repository, or of that in its working directory.

    Raises InvalidImageError.
    """
    tree, repositories = image["tree"], image["repositories"]
    if tree in repositories:
        return str(tree)
    if not repositories:
        raise _refused("it has no repository")
    names = ", ".join(repositories[:5]) + (" and others" if len(repositories) > 5 else "")
    raise _refused(f"it has {len(repositories)} repositories, and none at {tree}: {names}")


def write_upstream(stack: Sequence[Path], tree: str, place: Path) -> None:
    """Make the upstream at `place` from the repository in the directory `tree` of an image, whose
    `stack` of layers begins with the top; one that is there is replaced.

    Raises InvalidImageError.
    """
    scratch = place.with_name(f".new-{place.name}")
    remove_tree(scratch)  # left by a kill
    try:
        above = [inside for layer in stack if (inside := directory_in(layer, tree))]
        try:
            repository = take_repository(above, scratch)
        except FileNotFoundError as error:  # `.git` is a file, of a worktree or a submodule
            raise _refused(f"the repository at {tree} has no objects") from error
        _put_refs(repository, tree)
        if exists(place):
            exchange(repository, place)
        else:
            repository.rename(place)
    finally:
        remove_tree(scratch)


_FORMAT = "--format=%(objecttype) %(objectname) %(refname)"
# mirrors follow branches and tags; an image has the future in remotes and stashes too
_FOLLOWED = ("refs/heads/", "refs/tags/")
_OTHERS = "refs/heads/from-image/"


def _put_refs(repository: Path, tree: str) -> None:
    """Give HEAD a branch, and branches to the refs that a mirror would not follow."""
    words = ("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    listed = run_git_sync(*words, git_dir=repository, ok=(0, 1, 128), doing="read an image's HEAD")
    if not (head := listed.stdout.decode().strip()):
        raise _refused(f"the repository at {tree} has no commit at its HEAD")
    doing = "list the refs of an image"
    lines = run_git_sync("for-each-ref", _FORMAT, git_dir=repository, doing=doing).stdout
    refs = {}
    for line in lines.splitlines():
        kind, oid, name = line.split(b" ", 2)
        if name.startswith(tuple(map(str.encode, _FOLLOWED))):
            refs[name] = oid
        elif kind == b"commit":
            refs[_OTHERS.encode() + name.removeprefix(b"refs/")] = oid
    refs[f"refs/heads/{FROM_IMAGE_HEAD}".encode()] = head.encode()
    remove_tree(repository / "refs")
    (repository / "refs").mkdir()
    packed = b"".join(b"%s %s\n" % (oid, name) for name, oid in sorted(refs.items()))
    (repository / "packed-refs").unlink(missing_ok=True)  # a link to the image's
    (repository / "packed-refs").write_bytes(packed)
    (repository / "HEAD").write_text(f"ref: refs/heads/{FROM_IMAGE_HEAD}\n")


def _refused(fact: str) -> InvalidImageError:
    return InvalidImageError(
        f"cannot make a mirror of the image: {fact}",
        hint="`mirrord environment import IMAGE --tree PATH` says where its repository is",
    )
