"""Commits: resolving what a person typed, ancestry, times, and the one commit of a squashed history."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pygit2

from ...errors import CommitNotFoundError, CorruptObjectError
from ...model import NEAR, CommitId, Resolved, shown
from .increments import first_parents_in
from .repositories import Objects, open_objects

_COMMITISH = re.compile(
    r"([^~^:@{}\s\x00-\x1f\x7f?*\[\\]+(?:@(?!\{)[^~^:@{}\s\x00-\x1f\x7f?*\[\\]*)*)((?:[~^]\d*)*)"
)
_HEX = re.compile(r"[0-9a-fA-F]{4,40}")
_SQUASHED_MESSAGE = "base commit\n"
_SQUASHED_NAME, _SQUASHED_EMAIL = "mirrord", "mirrord@localhost"


@dataclass(frozen=True)
class CommitInfo:
    """`time` is the committer's, in seconds since the epoch."""

    commit: CommitId
    tree: str
    parents: tuple[CommitId, ...]
    time: int


def resolve(git_dir: Path, commitish: str) -> Resolved:
    """What a full or abbreviated id, branch, tag or ref names, with any `~N` and `^N`.

    Raises CommitNotFoundError, also where the text could mean two different commits.
    """
    with open_objects(git_dir) as objects:
        found = read_commit(objects, commitish)
        return Resolved(found.commit, found.tree, found.time, _near(objects, found.commit))


def _near(objects: Objects, commit: CommitId) -> tuple[CommitId, ...]:
    try:
        return tuple(first_parents_in(objects, commit, NEAR))
    except CorruptObjectError:
        return ()


def _resolve(repository: pygit2.Repository, commitish: str) -> pygit2.Commit:
    parts = _COMMITISH.fullmatch(commitish)
    if parts is None:
        raise _not_found(commitish, "it is no commit id, branch or tag")
    base, steps = parts.groups()
    if len(base) == 40 and _HEX.fullmatch(base):
        found = {_find(repository, base)} - {None}
    else:
        named = {
            _find(repository, name) for name in (base, f"refs/tags/{base}", f"refs/heads/{base}")
        }
        found = (named | {_find_abbreviated(repository, base)}) - {None}
    if len(found) > 1:
        raise _not_found(
            commitish,
            "it could mean two different commits",
            hint="give the whole id, or refs/heads/… or refs/tags/…",
        )
    if not found:
        raise _not_found(commitish, "no commit of the mirror has that name")
    (start,) = found
    return _step(repository, commitish, f"{start}{steps}")


def _find(repository: pygit2.Repository, name: str) -> str | None:
    """The id of the commit that `name` peels to."""
    try:
        return str(repository.revparse_single(name).peel(pygit2.Commit).id)
    except ValueError as error:
        if "ambiguous" in str(error):
            raise _not_found(
                name, "several objects begin with these digits", hint="give the whole id"
            ) from error
        return None
    except (KeyError, pygit2.InvalidSpecError):
        return None
    except pygit2.GitError as error:
        raise CorruptObjectError(
            f"cannot read commit {shown(name)}: {error}", hint="audit and heal the mirror"
        ) from error


def _find_abbreviated(repository: pygit2.Repository, digits: str) -> str | None:
    """The commit whose id begins with `digits`: libgit2 does not look for it where a branch is called the same."""
    if not _HEX.fullmatch(digits):
        return None
    try:
        found = repository.get(digits)
        return str(found.peel(pygit2.Commit).id) if found is not None else None
    except (ValueError, pygit2.InvalidSpecError):
        return None


def _step(repository: pygit2.Repository, commitish: str, expression: str) -> pygit2.Commit:
    try:
        return repository.revparse_single(expression).peel(pygit2.Commit)
    except (KeyError, ValueError, pygit2.GitError) as error:
        raise _not_found(commitish, "its history does not go back that far") from error


def _not_found(
    commitish: str, fact: str, hint: str = "sync the mirror, or check the spelling"
) -> CommitNotFoundError:
    return CommitNotFoundError(
        f"cannot resolve commit {shown(commitish)}: {fact}", hint=hint, commit=commitish[:200]
    )


def read_commit(objects: Objects, commit: str) -> CommitInfo:
    found = _resolve(objects.repository, commit)
    parents = tuple(CommitId(str(parent)) for parent in found.parent_ids)
    return CommitInfo(CommitId(str(found.id)), str(found.tree_id), parents, found.commit_time)


def is_ancestor(git_dir: Path, ancestor: str, descendant: str) -> bool:
    """Whether `ancestor` is in the history of `descendant`; a commit is its own ancestor."""
    with open_objects(git_dir) as objects:
        return ancestor == descendant or objects.repository.descendant_of(descendant, ancestor)
