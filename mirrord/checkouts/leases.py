"""Leases: who holds which checkout until when, and the two directories of a checkout.

`checkouts/<id>` is the client's: only its owner and the daemon enter it, and it holds `tree`.
`leases/<id>` (0700) is private and has the lease itself, which is in no database. A directory
without a lease is half-made; `.trash-<id>` was released. One whose lease cannot be read is neither:
it is set aside, with all that its owner made.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import (
    BackendUnavailableError,
    CheckoutNotFoundError,
    DiskFailedError,
    MirrordError,
    full_disk_named,
)
from ..host.files import grant_search, opened, read_plain, write_all
from ..host.trash import TRASH_PREFIX
from ..model import Backend, CheckoutId, LayerId, new_checkout_id, shown
from ..presence import is_dir
from ..telemetry import log
from .lease import Directories, Lease, LeaseState, from_json, to_json


class Aside(NamedTuple):
    """A checkout that a start could not take over, and why; its lease, if that could be read."""

    reason: str
    lease: "Lease | None"


class Leases:
    """The leases of a state directory. A call makes a few system calls on the event loop's thread.

    `public` is the directory of checkouts. `count` is their number, including those being made;
    `held_by` counts them by owner and taker, `taken_by` by taker. `layers` counts the leases and
    prepared layers that keep a layer. `aside` has the checkouts that were set aside, `unread` the
    records of prepared layers that could not be read, with reasons.
    """

    def __init__(self, state_dir: Path) -> None:
        self.public = state_dir / "checkouts"
        self._private = state_dir / "leases"
        self._live: dict[CheckoutId, Lease] = {}
        self.count = 0
        self.held_by: Counter[int] = Counter()
        self.taken_by: Counter[int] = Counter()
        self.layers: Counter[LayerId] = Counter()
        self.aside: dict[CheckoutId, Aside] = {}
        self.unread: dict[Path, str] = {}

    def open(self) -> tuple[list[Lease], list[Directories]]:
        """Read the leases of an earlier daemon; return them, and the directories without one."""
        # owners pass through to their own checkouts, and list nobody's
        self.public.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._private.mkdir(mode=0o700, exist_ok=True)
        trash = []
        for name in sorted({*os.listdir(self.public), *os.listdir(self._private)}):
            directories = self.directories(name)
            try:
                lease = None if name.startswith(".") else _read(directories)
            except _UnreadableError as error:
                self.set_aside(CheckoutId(name), str(error))
                continue
            if lease is None:
                trash.append(directories)
            else:
                self._set(lease)
                self.add(lease.terms.taken_by, lease.terms.owner_uid)
        return list(self._live.values()), trash

    def set_aside(self, checkout: CheckoutId, reason: str) -> None:
        """Keep a checkout as it is, with the layers that it is known to need, until it is released
        or the next start can take it over.
        """
        lease = self._live.pop(checkout, None)
        if lease:
            self.add(lease.terms.taken_by, lease.terms.owner_uid, -1)
        self.aside[checkout] = Aside(reason, lease)
        log.warning("checkout.set_aside", checkout=checkout, reason=reason)

    def drop_aside(self, checkout: CheckoutId) -> Directories:
        """Give up a checkout that was set aside; return what is left to remove."""
        gone = self.discard(self.directories(checkout))
        if lease := self.aside.pop(checkout).lease:
            self.layers.subtract(lease.layers)
        return gone

    @property
    def knows_all(self) -> bool:
        """Whether every lease and record was read, and so all that must stay on disk is known."""
        return not self.unread and all(aside.lease for aside in self.aside.values())

    def problems(self) -> list[str]:
        """Return a reason why the daemon is degraded for each thing that was set aside."""
        hint = "see docs/reliability.md, Set aside"
        checkouts = [f"checkout {name}: {aside.reason}" for name, aside in self.aside.items()]
        layers = [f"the record of a saved layer {path}: {why}" for path, why in self.unread.items()]
        return [f"set aside, nothing was removed: {what} ({hint})" for what in checkouts + layers]

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(sorted(self._live.values(), key=lambda lease: lease.terms.created_at))

    def directories(self, name: str) -> Directories:
        return Directories(self.public / name, self._private / name)

    def like(self, lease: Lease, backend: Backend) -> Lease:
        """Return the lease under a new id, for another attempt or a fork."""
        checkout = new_checkout_id()
        return replace(lease, id=checkout, directories=self.directories(checkout), backend=backend)

    def add(self, taken_by: int, owner_uid: int, n: int = 1) -> None:
        """Count `n` more checkouts."""
        self.count += n
        self.taken_by[taken_by] += n
        for uid in {taken_by, owner_uid}:
            self.held_by[uid] += n

    def begin(self, lease: Lease) -> None:
        """Make the directories of a new checkout, and the file that `put` publishes."""
        with full_disk_named(f"the lease of checkout {lease.id}"):
            # from here on a crash leaves directories without a lease, which the next start removes
            os.mkdir(lease.directories.private, 0o700)
            _write(f"{lease.directories.private}/{lease.state}.new", lease)
            os.mkdir(lease.directories.public, 0o700)
            if lease.terms.owner_uid != os.geteuid():
                _let_in(lease.terms.owner_uid, lease.directories.public)

    def find(self, checkout: CheckoutId) -> Lease | None:
        return self._live.get(checkout)

    def get(self, text: str) -> Lease:
        """Return the lease of an id, or of any path into its checkout."""
        checkout = self._id_of(text)
        if checkout in self.aside:
            raise DiskFailedError(
                f"cannot use checkout {checkout}, which is set aside:"
                f" {self.aside[checkout].reason}",
                hint="an administrator can repair it and restart the daemon, or release it",
            )
        lease = self._live.get(checkout)
        if lease is None:
            raise not_found(text)
        return lease

    def find_aside(self, text: str) -> CheckoutId | None:
        """Return the id of a checkout that was set aside, given by id or path."""
        checkout = self._id_of(text)
        return checkout if checkout in self.aside else None

    def _id_of(self, text: str) -> CheckoutId:
        if text.startswith("/"):
            # links are left to the client, who follows them with its own rights
            path = Path(os.path.normpath(text))
            if path.is_relative_to(self.public) and path != self.public:
                return CheckoutId(path.relative_to(self.public).parts[0])
        return CheckoutId(text)

    def prepare(self, lease: Lease) -> None:
        """Write and flush the file for the next `put`. Run it in a thread: a flush takes long."""
        with full_disk_named(f"the lease of checkout {lease.id}"):
            _write(f"{lease.directories.private}/{lease.state}.new", lease, durably=True)

    def put(self, lease: Lease) -> None:
        """Publish the lease that `begin` or `prepare` wrote."""
        with full_disk_named(f"the lease of checkout {lease.id}"):
            _replace(f"{lease.directories.private}/{lease.state}")
        if lease.id not in self._live:
            self.add(lease.terms.taken_by, lease.terms.owner_uid)
        self._set(lease)

    def save(self, lease: Lease) -> None:
        """Replace a lease. If only its state changes, the file is renamed and not written."""
        before, path = self._live[lease.id], f"{lease.directories.private}/{lease.state}"
        with full_disk_named(f"the lease of checkout {lease.id}"):
            if replace(before, state=lease.state) == lease:
                os.rename(f"{lease.directories.private}/{before.state}", path)
            else:
                _write(f"{path}.new", lease)
                _replace(path)
                if before.state is not lease.state:
                    # last: without a file of either name the checkout would have no lease
                    os.unlink(f"{lease.directories.private}/{before.state}")
        self._set(lease)

    def amend(self, lease: Lease) -> None:
        """Replace a lease; where the disk refuses that, until the next start."""
        try:
            self.save(lease)
        except (MirrordError, OSError) as error:
            log.warning("lease.unsaved", checkout=lease.id, reason=str(error))
            self._set(lease)

    def release(self, lease: Lease) -> Directories:
        """End the lease by renaming its directories; return what is left to remove."""
        gone = self.discard(lease.directories)
        if before := self._live.pop(lease.id, None):
            self.add(lease.terms.taken_by, lease.terms.owner_uid, -1)
            self.layers.subtract(before.layers)
        return gone

    def _set(self, lease: Lease) -> None:
        before = self._live.get(lease.id)
        self._live[lease.id] = lease
        if before is None or before.layers != lease.layers:
            self.layers.update(lease.layers)
            self.layers.subtract(before.layers if before else ())

    def discard(self, directories: Directories) -> Directories:
        """Rename the directories of a checkout to trash, the private one first, which ends it.

        A mount below the public one moves with it: only a mount point itself cannot be renamed.
        """
        name = directories.public.name
        if name.startswith(TRASH_PREFIX):
            return directories
        gone = self.directories(f"{TRASH_PREFIX}{name}")
        for before, after in zip(reversed(directories), reversed(gone), strict=True):
            with suppress(FileNotFoundError):
                os.rename(before, after)
        return gone


def not_found(text: str) -> CheckoutNotFoundError:
    """Return the error for a checkout that does not exist, or that the peer may not see."""
    return CheckoutNotFoundError(
        f"cannot find checkout {shown(text)}: you have no such checkout",
        hint="see `mirrord checkouts`; it may have expired",
    )


def _let_in(uid: int, directory: Path) -> None:
    """Let the owner enter. Root needs it where it lacks CAP_DAC_OVERRIDE, as in a sandbox."""
    try:
        grant_search(str(directory), uid)
    except BackendUnavailableError:
        if uid != 0:
            raise


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


def _write(path: str, lease: Lease, *, durably: bool = False) -> None:
    try:
        # A flush costs more than the rest of a checkout: a power failure may lose a lease that was
        # made or reset seconds ago, but never leaves half of one.
        with opened(os.open(path, _CREATE, 0o600)) as fd:
            write_all(fd, to_json(lease, "directories", "state"))
            # a renewal replaces a lease that may be hours old: on some file systems a power cut
            # would bring it back empty
            if durably:
                os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise


def _replace(path: str) -> None:
    """Rename the new file of a lease to its name, or else remove it."""
    try:
        os.rename(f"{path}.new", path)
    except OSError:
        with suppress(OSError):
            os.unlink(f"{path}.new")
        raise


def find_unreadable(state_dir: Path) -> dict[str, str]:
    """Return the checkouts that a start would set aside because of their lease, with reasons."""
    public, private = state_dir / "checkouts", state_dir / "leases"
    reasons = {}
    for name in sorted(os.listdir(private)) if is_dir(private) else ():
        try:
            if not name.startswith("."):
                _read(Directories(public / name, private / name))
        except _UnreadableError as error:
            reasons[name] = str(error)
    return reasons


class _UnreadableError(Exception):
    """There is a lease that cannot be read."""


def _read(directories: Directories) -> Lease | None:
    """Return the lease of a checkout, None if it has none; raises _UnreadableError."""
    # LIVE first: a crash may leave both files (`LeaseState`)
    for state in LeaseState:
        try:
            content = read_plain(directories.private / state)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # EIO, EMFILE, EACCES
            raise _UnreadableError(f"cannot read its {state}: {error.strerror}") from error
        try:
            members = from_json(Lease, json.loads(content))
            lease = Lease(**members, directories=directories, state=state)
        except (ValueError, KeyError, TypeError, AttributeError, MirrordError) as error:
            raise _UnreadableError(f"cannot read its {state}: it is damaged") from error
        if lease.id != directories.public.name:
            raise _UnreadableError(f"its {state} is of checkout {shown(lease.id)}")
        try:
            is_there = is_dir(directories.public)
        except OSError as error:
            fact = f"cannot read its directory {directories.public}: {error.strerror}"
            raise _UnreadableError(fact) from error
        if not is_there:
            raise _UnreadableError(f"its directory {directories.public} is gone")
        return lease
    return None
