"""Leases: who holds which checkout until when, and the two directories that a checkout has.

`checkouts/<id>` is what clients get: it is entered by the owner and the daemon alone, is stable
over resets, and holds `tree`. `leases/<id>` (0700) has all that is private, and is the truth: no
database knows a lease. A lease is `lease.json` there, or `resetting.json` while a tree is
changed. A directory of either kind without a whole one is half-made; one called `.trash-<id>` was
released; both are only rubbish. Nothing is flushed: after a power cut a lease that was seconds
old may be gone, but never half there. Only what replaces a lease that has stood for long, a
renewal, is flushed first. Never touches what is inside the tree.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import structlog

from ..errors import CheckoutNotFoundError
from ..host.files import admit, full_disk_named, opened, write_all
from ..host.pidfds import Process
from ..host.trash import PREFIX
from ..model import Backend, CheckoutId, CommitId, History, MirrorName, View, shown

_PRIVATE = 0o700

log = structlog.get_logger()


class LeaseState(StrEnum):
    """LIVE: the tree is clean or its owner's work. RESETTING: it is being brought to the lease's commit; after a crash, again.

    The state is the name of the lease's file, so that a reset to where a checkout is costs two renames. Where a crash left both
    files, nothing was touched yet, or all was done: it is live. A lease being made has no file yet; one being released has lost
    its directory's name. Neither needs a state.
    """

    LIVE = "lease.json"
    RESETTING = "resetting.json"


@dataclass(frozen=True, slots=True)
class Directories:
    """The two directories of a checkout; they have the same name."""

    public: Path
    private: Path

    def renamed(self, name: str) -> Directories:
        return Directories(self.public.with_name(name), self.private.with_name(name))


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to one checkout. `commit` and `tree` are what it is, or while RESETTING becomes, clean at.

    `taken_by` is the uid that asked for it, for `owner_uid`; `bound_to` the process that it ends with;
    `dataset` the one whose `instance` it is.
    """

    id: CheckoutId
    directories: Directories
    mirror: MirrorName
    commit: CommitId
    tree: str
    instance: str | None
    history: History
    view: View
    backend: Backend
    owner_uid: int
    owner_gid: int
    taken_by: int
    created_at: datetime
    expires_at: datetime
    bound_to: Process | None = None
    dataset: str | None = None
    state: LeaseState = LeaseState.LIVE

    @property
    def directory(self) -> Path:
        """What can be mounted elsewhere, and follows every reset."""
        return self.directories.public

    @property
    def private(self) -> Path:
        return self.directories.private

    @property
    def tree_path(self) -> Path:
        """What the client gets."""
        return self.directory / "tree"

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at <= now


class Holdings:
    """How many checkouts there are, and how many each uid has: as their owner or as the one that took them."""

    def __init__(self) -> None:
        self.count = 0
        self.of: Counter[int] = Counter()
        self.taken_by: Counter[int] = Counter()

    def add(self, taken_by: int, owner_uid: int, n: int = 1) -> None:
        """Count one more, or with `n` -1 one less."""
        self.count += n
        places = [(self.taken_by, taken_by), *((self.of, uid) for uid in {taken_by, owner_uid})]
        for counter, uid in places:
            counter[uid] += n
            if not counter[uid]:
                del counter[uid]


class Leases:
    """The leases of a state directory. Each call is a few system calls; all belong to the event loop's thread."""

    def __init__(self, state_dir: Path) -> None:
        self._public = state_dir / "checkouts"
        self._private = state_dir / "leases"
        self._live: dict[CheckoutId, Lease] = {}
        self.holdings = Holdings()

    def open(self) -> tuple[list[Lease], list[Directories]]:
        """Read what an earlier daemon left: the leases that stand, and the directories that are rubbish."""
        self._public.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._private.mkdir(mode=_PRIVATE, exist_ok=True)
        names = sorted(
            {path.name for above in (self._public, self._private) for path in above.iterdir()}
        )
        found = [(self.directories(name), _find(self.directories(name))) for name in names]
        for lease in (lease for _, lease in found if lease is not None):
            self._live[lease.id] = lease
            self.holdings.add(lease.taken_by, lease.owner_uid)
        return list(self._live.values()), [
            directories for directories, lease in found if lease is None
        ]

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(sorted(self._live.values(), key=lambda lease: lease.created_at))

    def directories(self, name: str) -> Directories:
        return Directories(self._public / name, self._private / name)

    def begin(self, lease: Lease) -> None:
        """Make the directories of a new checkout, with the lease that `put` makes stand."""
        with _full_disk_named(lease):
            os.mkdir(lease.private, _PRIVATE)
            _write(f"{lease.private}/{lease.state}.new", lease)
            os.mkdir(lease.directory, _PRIVATE)
            if lease.owner_uid not in (0, os.geteuid()):
                admit(str(lease.directory), lease.owner_uid)

    def get(self, text: str) -> Lease:
        """The lease that an id, or a checkout's path, names; raises CheckoutNotFoundError."""
        lease = self.find(CheckoutId(self._id_in(text)))
        if lease is None:
            raise not_found(text)
        return lease

    def find(self, checkout: CheckoutId) -> Lease | None:
        return self._live.get(checkout)

    def prepare(self, lease: Lease) -> None:
        """Write durably what `put` puts in the place of the lease's file. For a thread: the disk may take its time."""
        with _full_disk_named(lease):
            _write(f"{lease.private}/{lease.state}.new", lease, durably=True)

    def put(self, lease: Lease) -> None:
        """Make the lease stand as it was written."""
        with _full_disk_named(lease):
            os.rename(f"{lease.private}/{lease.state}.new", f"{lease.private}/{lease.state}")
        if lease.id not in self._live:
            self.holdings.add(lease.taken_by, lease.owner_uid)
        self._live[lease.id] = lease

    def save(self, lease: Lease) -> None:
        """Make a lease that stands be as this one is."""
        before = self._live[lease.id]
        place = f"{lease.private}/{lease.state}"
        with _full_disk_named(lease):
            if replace(before, state=lease.state) == lease:
                os.rename(f"{lease.private}/{before.state}", place)
            else:
                _write(f"{place}.new", lease)
                os.rename(f"{place}.new", place)
                if before.state is not lease.state:
                    os.unlink(f"{lease.private}/{before.state}")
        self._live[lease.id] = lease

    def drop(self, lease: Lease) -> Directories:
        """End the lease at once, by renaming its directories; answers what is left to delete."""
        gone = self.discard(lease.directories)
        if self._live.pop(lease.id, None):
            self.holdings.add(lease.taken_by, lease.owner_uid, -1)
        return gone

    def discard(self, directories: Directories) -> Directories:
        """Mark directories as rubbish, the private one first: the lease ends there.

        A mount inside the public one goes along: only the mount point itself could not be renamed.
        """
        name = directories.public.name
        if name.startswith(PREFIX):
            return directories
        gone = self.directories(f"{PREFIX}{name}")
        for before, after in (
            (directories.private, gone.private),
            (directories.public, gone.public),
        ):
            with suppress(FileNotFoundError):
                os.rename(before, after)
        return gone

    def _id_in(self, text: str) -> str:
        """The id in a path into a checkout; any other text as it is."""
        if not text.startswith("/"):
            return text
        parts = Path(os.path.normpath(text)).parts
        above = self._public.parts
        if parts[: len(above)] != above or len(parts) == len(above):
            raise not_found(text)
        return parts[len(above)]


def _full_disk_named(lease: Lease) -> AbstractContextManager[None]:
    return full_disk_named(f"the lease of checkout {lease.id}")


def not_found(text: str) -> CheckoutNotFoundError:
    """The same answer for a checkout that is not there and for one that is somebody else's."""
    return CheckoutNotFoundError(
        f"cannot find checkout {shown(text)}: there is no such checkout of yours",
        hint="see `mirrord checkouts`; it may have expired",
    )


def _find(directories: Directories) -> Lease | None:
    """The lease of a checkout; None where there is none, or not all of it."""
    return _read(directories, LeaseState.LIVE) or _read(directories, LeaseState.RESETTING)


def _read(directories: Directories, state: LeaseState) -> Lease | None:
    try:
        facts = json.loads((directories.private / state).read_bytes())
        lease = _from_json(facts, directories, state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return lease if lease.id == directories.public.name and directories.public.is_dir() else None


def _write(path: str, lease: Lease, *, durably: bool = False) -> None:
    data = json.dumps(_to_json(lease)).encode()
    try:
        with opened(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        ) as fd:
            write_all(fd, data)
            if durably:
                os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise


def _to_json(lease: Lease) -> dict[str, object]:
    """Written out, because `asdict` copies deeply: a third of the processor time of a checkout."""
    return {
        "id": lease.id,
        "mirror": str(lease.mirror),
        "commit": lease.commit,
        "tree": lease.tree,
        "instance": lease.instance,
        "dataset": lease.dataset,
        "history": lease.history,
        "view": lease.view,
        "backend": lease.backend,
        "owner_uid": lease.owner_uid,
        "owner_gid": lease.owner_gid,
        "taken_by": lease.taken_by,
        "created_at": lease.created_at.isoformat(),
        "expires_at": lease.expires_at.isoformat(),
        "bound_to": [lease.bound_to.pid, lease.bound_to.mark] if lease.bound_to else None,
    }


def _from_json(facts: dict[str, Any], directories: Directories, state: LeaseState) -> Lease:
    return Lease(
        id=CheckoutId(facts["id"]),
        directories=directories,
        mirror=MirrorName.parse(facts["mirror"]),
        commit=CommitId(facts["commit"]),
        tree=facts["tree"],
        instance=facts["instance"],
        history=History(facts["history"]),
        view=View(facts["view"]),
        backend=Backend(facts["backend"]),
        owner_uid=int(facts["owner_uid"]),
        owner_gid=int(facts["owner_gid"]),
        taken_by=int(facts["taken_by"]),
        created_at=datetime.fromisoformat(facts["created_at"]),
        expires_at=datetime.fromisoformat(facts["expires_at"]),
        bound_to=Process(*facts["bound_to"]) if facts["bound_to"] else None,
        dataset=facts.get("dataset"),
        state=state,
    )


def resetting(lease: Lease) -> Lease:
    """The lease as it stands while the checkout is brought to it."""
    return replace(lease, state=LeaseState.RESETTING)
