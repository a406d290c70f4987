"""What verify-seal finds: in one repository, or below a root."""

from .codec import Answer


class SealLeak(Answer):
    kind: str
    detail: str


class SealReport(Answer):
    """The answer of `verify-seal`, and of the daemon on the store below a checkout. `sealed` is
    true when there are no leaks.
    """

    path: str
    base: str
    sealed: bool
    head: str | None = None
    objects_present: int = 0
    objects_in_closure: int = 0
    leaks: list[SealLeak] = []
    checked: list[str] = []


class RootLeak(SealLeak):
    """Something in a directory or an image that was not there at the base commit, or leads there.

    `path` is from the top, with `!` between an archive and its member. A `future-file` has the
    content that `name` got in `commit`, the first with it. `hidden`: a later layer of the image
    covers it, so that a container does not show it.
    """

    path: str
    commit: str | None = None
    name: str | None = None
    hidden: bool = False


class RootReport(Answer):
    """The answer of `verify-seal --root`; `sealed` is true when no leak is but hidden.

    `notes` tell what was left out, and repositories of other projects.
    """

    root: str
    base: str
    sealed: bool
    file_count: int
    size_bytes: int
    repositories: list[str]
    leaks: list[RootLeak]
    notes: list[str]
