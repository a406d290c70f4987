"""A change: one path of a checkout that differs from the tree of its base commit."""

from typing import NamedTuple

from ...git.objects.trees import TreeEntry


class Change(NamedTuple):
    """A path that differs from the base tree, as git records it.

    `mode` is git's (0o100644, 0o100755, 0o120000, 0o160000), None where the path is removed; `data`
    is the blob (eol, ident and encoding undone), empty where removed or a submodule; `old` is the
    entry of the base tree, None where the path is new.
    """

    path: bytes
    mode: int | None
    data: bytes
    old: TreeEntry | None
