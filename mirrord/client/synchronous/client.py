# Generated from ../asynchronous/client.py by tests/support/unasync.py: edit that file, then run it.
"""The daemon as an object: one method for each endpoint, in the order of the endpoint table. Long work answers an operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from ... import protocol
from ...errors import (
    CancelledError,
    DeadlineError,
    NoDaemonError,
    OperationNotFoundError,
    from_problem,
)
from ...model import AuditLevel, Backend, Bind, History, View
from ..answers import message, read_list, read_one, retry_pauses, seconds_of
from ..events import EventReader
from ..sockets import socket_path
from ..twins_sync import chunks, pause, write
from .checkout import Checkout
from .connection import Connection
from .renewal import Renewal

_UNAVAILABLE = 503
_POLL_SECONDS = 0.25


class Client:
    """One daemon. Use it in a `with` block, or close it; it may be shared by any number of threads.

    `socket` is MIRRORD_SOCKET by default, else what the configuration says. `timeout` bounds the daemon's silence within one
    answer, `patience` how long a request that may safely be sent again waits for a restarting daemon.
    """

    def __init__(
        self,
        socket: Path | str | None = None,
        *,
        config: Path | str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        patience: timedelta = timedelta(seconds=10),
    ) -> None:
        self.socket = socket_path(socket, config)
        self._patience = patience
        self._connection = Connection(self.socket, timeout=timeout, patience=patience)
        self._renewal = Renewal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Renew no more leases, and close the connections."""
        self._renewal.stop()
        self._connection.close()

    # -- the daemon ---------------------------------------------------------------------------------------------------

    def health(self) -> protocol.Health:
        """Whether the daemon can serve; `degraded` comes with reasons and is no error."""
        return read_one(
            self._connection.request("GET", "health", accepted=(_UNAVAILABLE,)),
            protocol.Health,
        )

    def status(self) -> protocol.Status:
        return read_one(self._connection.request("GET", "status"), protocol.Status)

    def configuration(self) -> protocol.Configuration:
        """The settings in force; for administrators."""
        return read_one(self._connection.request("GET", "config"), protocol.Configuration)

    def reload(self) -> protocol.ReloadAnswer:
        """Read the configuration again; a faulty file raises and changes nothing."""
        return read_one(self._connection.request("POST", "reload"), protocol.ReloadAnswer)

    def metrics(self) -> str:
        """All metrics in Prometheus text."""
        return (self._connection.request("GET", "/metrics")).body.decode()

    # -- mirrors ------------------------------------------------------------------------------------------------------

    def list_mirrors(self) -> list[protocol.Mirror]:
        return read_list(self._connection.request("GET", "mirrors"), protocol.Mirror)

    def get_mirror(self, name: str) -> protocol.Mirror:
        return read_one(
            self._connection.request("GET", f"mirrors/{_mirror(name)}"), protocol.Mirror
        )

    def add_mirror(self, repo: str, url: str | None = None) -> protocol.Operation:
        """Add a mirror and sync it for the first time."""
        body = message(protocol.AddMirror, repo=repo, url=url)
        return read_one(self._connection.request("POST", "mirrors", body=body), protocol.Operation)

    def sync_mirror(self, name: str, *, accept_loss: bool = False) -> protocol.Operation:
        """Bring a mirror up to date; with `accept_loss` even where upstream lost most of what it had, which the mirror keeps."""
        body = message(protocol.SyncMirror, accept_loss=accept_loss)
        return read_one(
            self._connection.request("POST", f"mirrors/{_mirror(name)}/sync", body=body),
            protocol.Operation,
        )

    def remove_mirror(self, name: str) -> None:
        self._connection.request("DELETE", f"mirrors/{_mirror(name)}")

    def log_refs(self, name: str) -> list[protocol.RefRecord]:
        """The mirror's ref history, newest first."""
        return read_list(
            self._connection.request("GET", f"mirrors/{_mirror(name)}/refs/log"),
            protocol.RefRecord,
        )

    def diff_refs(self, name: str, a: str, b: str) -> protocol.RefDiff:
        """What upstream did between two records of the ref history."""
        return read_one(
            self._connection.request("GET", f"mirrors/{_mirror(name)}/refs/diff", a=a, b=b),
            protocol.RefDiff,
        )

    def restore_refs(self, name: str, at: str) -> protocol.Operation:
        """Put the mirror's refs back to a record of its history; tips that this moves away from are kept."""
        body = message(protocol.RestoreRefs, at=at)
        return read_one(
            self._connection.request("POST", f"mirrors/{_mirror(name)}/refs/restore", body=body),
            protocol.Operation,
        )

    # -- bundles ------------------------------------------------------------------------------------------------------

    def create_bundle(
        self,
        name: str,
        file: Path | str,
        *,
        since: str | None = None,
        progress: Callable[[protocol.Progress], None] | None = None,
    ) -> protocol.BundleFile:
        """Write a mirror with its pins, kept refs, ref history and records into `file`, which git can read.

        `since` is the record (an id, a time, `latest`) that whoever gets it has. The file appears when it is whole.
        """
        with self._connection.stream(f"mirrors/{_mirror(name)}/bundle", since=since) as (
            head,
            body,
        ):
            size = write(
                Path(file),
                body,
                lambda done: progress and progress(protocol.Progress(done=done, unit="bytes")),
            )
            mirror, record = head.headers["x-mirrord-mirror"], head.headers["x-mirrord-record"]
        return protocol.BundleFile(
            mirror=mirror, file=str(file), size_bytes=size, record=record or None, since=since
        )

    def import_bundle(
        self,
        file: Path | str,
        *,
        mirror: str | None = None,
        progress: Callable[[protocol.Progress], None] | None = None,
    ) -> protocol.Operation:
        """Stream a bundle to the daemon, into the mirror it names or into `mirror`. `progress` hears of the bytes sent."""
        path = Path(file)
        total = path.stat().st_size
        content = chunks(
            path,
            lambda done: (
                progress and progress(protocol.Progress(done=done, total=total, unit="bytes"))
            ),
        )
        return read_one(
            self._connection.request("POST", "bundles", content=content, mirror=mirror),
            protocol.Operation,
        )

    # -- pins ---------------------------------------------------------------------------------------------------------

    def list_pins(self, mirror: str | None = None) -> list[protocol.Pin]:
        return read_list(self._connection.request("GET", "pins", mirror=mirror), protocol.Pin)

    def pin(self, mirror: str, commit: str, reason: str = "") -> protocol.Pin:
        """Keep a commit alive under your own name; its closure is verified first."""
        body = message(protocol.AddPin, mirror=mirror, commit=commit, reason=reason)
        return read_one(self._connection.request("POST", "pins", body=body), protocol.Pin)

    def unpin(self, mirror: str, commit: str, owner: str | None = None) -> None:
        """Take away your own pin, or as an administrator that of `owner`."""
        self._connection.request(
            "DELETE", f"pins/{_mirror(mirror)}/{quote(commit, safe='')}", owner=owner
        )

    # -- datasets -----------------------------------------------------------------------------------------------------

    def list_datasets(self) -> list[protocol.Dataset]:
        return read_list(self._connection.request("GET", "datasets"), protocol.Dataset)

    def get_dataset(self, name: str) -> protocol.Dataset:
        return read_one(
            self._connection.request("GET", f"datasets/{quote(name, safe='')}"),
            protocol.Dataset,
        )

    def import_dataset(
        self,
        file: Path | str,
        *,
        name: str | None = None,
        format: str | None = None,  # noqa: A002
        progress: Callable[[protocol.Progress], None] | None = None,
    ) -> protocol.Operation:
        """Stream a dataset file to the daemon; mirrors, fetches and pins what it records. `progress` hears of the bytes sent."""
        path = Path(file)
        total = path.stat().st_size
        content = chunks(
            path,
            lambda done: (
                progress and progress(protocol.Progress(done=done, total=total, unit="bytes"))
            ),
        )
        answer = self._connection.request(
            "POST", "datasets", content=content, filename=path.name, name=name, format=format
        )
        return read_one(answer, protocol.Operation)

    def remove_dataset(self, name: str) -> None:
        """Forget a dataset, and drop the pins that nobody else owns."""
        self._connection.request("DELETE", f"datasets/{quote(name, safe='')}")

    def list_formats(self) -> list[protocol.FormatInfo]:
        return read_list(self._connection.request("GET", "datasets/formats"), protocol.FormatInfo)

    def list_instances(self, dataset: str | None = None) -> list[protocol.InstanceName]:
        """All instances, or one dataset's; for administrators."""
        return read_list(
            self._connection.request("GET", "instances", dataset=dataset),
            protocol.InstanceName,
        )

    def get_instance(
        self, instance: str, *, view: View = View.AGENT, dataset: str | None = None
    ) -> protocol.Instance:
        """One instance; its patches only in the grader view, and only to who may see them."""
        path = f"instances/{quote(instance, safe='')}"
        answer = self._connection.request("GET", path, view=view.value, dataset=dataset)
        return read_one(answer, protocol.Instance)

    # -- audits and heals ---------------------------------------------------------------------------------------------

    def start_audit(
        self,
        *mirrors: str,
        dataset: str | None = None,
        level: AuditLevel | None = None,
        heal: bool | None = None,
    ) -> protocol.Operation:
        """Check that recorded commits can be served: of these mirrors, of this dataset, or all."""
        body = message(
            protocol.StartAudit, mirrors=list(mirrors), dataset=dataset, level=level, heal=heal
        )
        return read_one(self._connection.request("POST", "audits", body=body), protocol.Operation)

    def list_audits(self) -> list[protocol.Audit]:
        return read_list(self._connection.request("GET", "audits"), protocol.Audit)

    def get_audit(self, audit: str) -> protocol.Audit:
        return read_one(
            self._connection.request("GET", f"audits/{quote(audit, safe='')}"), protocol.Audit
        )

    def start_heal(self, *mirrors: str) -> protocol.Operation:
        """Audit all content of these mirrors, or of all, repair what is found, and audit again."""
        body = message(protocol.StartHeal, mirrors=list(mirrors))
        return read_one(self._connection.request("POST", "heals", body=body), protocol.Operation)

    def heal_with_bundle(
        self,
        mirror: str,
        file: Path | str,
        *,
        progress: Callable[[protocol.Progress], None] | None = None,
    ) -> protocol.Operation:
        """Heal one mirror with a bundle as one more donor, whatever repository it is of. `progress` hears of the bytes sent."""
        path = Path(file)
        total = path.stat().st_size
        content = chunks(
            path,
            lambda done: (
                progress and progress(protocol.Progress(done=done, total=total, unit="bytes"))
            ),
        )
        return read_one(
            self._connection.request("POST", f"mirrors/{_mirror(mirror)}/heal", content=content),
            protocol.Operation,
        )

    # -- checkouts ----------------------------------------------------------------------------------------------------

    def checkout(
        self,
        instance: str | None = None,
        *,
        mirror: str | None = None,
        commit: str | None = None,
        dataset: str | None = None,
        history: History | None = None,
        view: View = View.AGENT,
        backend: Backend | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: Bind = Bind.LEASE,
        auto_renew: bool = True,
    ) -> Checkout:
        """Lease a working tree at an instance's base commit, at NAME@COMMITISH, or at `commit` of `mirror`.

        `dataset` says whose instance, where several record the id differently.
        `ttl` is how long it is held unless renewed: a timedelta, seconds, or a duration such as "30m".
        With `auto_renew` this client renews it as long as the handle is there and not released.
        `owner` is the uid whose tree it is; `bind` "process" ends it with this process.
        """
        body = message(
            protocol.StartCheckout, instance=instance, mirror=mirror, commit=commit, history=history, view=view, backend=backend,
            ttl=seconds_of(ttl), owner=owner, bind=bind, dataset=dataset,
        )  # fmt: skip
        return self._check_out(body, auto_renew)

    def _check_out(self, body: protocol.StartCheckout, auto_renew: bool) -> Checkout:
        lease = read_one(
            self._connection.request("POST", "checkouts", body=body), protocol.Checkout
        )
        return self._handle(lease, body.ttl, auto_renew)

    def _handle(self, lease: protocol.Checkout, ttl: float | None, auto_renew: bool) -> Checkout:
        checkout = Checkout(self, lease, ttl)
        if auto_renew:
            self._renewal.hold(checkout)
        return checkout

    def open_checkout(self, checkout: str, *, auto_renew: bool = False) -> Checkout:
        """The handle of a checkout that is held already, perhaps by another process, which renews it then."""
        return self._handle(self.get_checkout(checkout), None, auto_renew)

    def list_checkouts(self) -> list[protocol.Checkout]:
        """The caller's own; an administrator's list holds everybody's."""
        return read_list(self._connection.request("GET", "checkouts"), protocol.Checkout)

    def get_checkout(self, checkout: str) -> protocol.Checkout:
        return read_one(
            self._connection.request("GET", f"checkouts/{quote(checkout, safe='')}"),
            protocol.Checkout,
        )

    def reset_checkout(
        self,
        checkout: str,
        instance: str | None = None,
        *,
        commit: str | None = None,
        dataset: str | None = None,
    ) -> protocol.ResetAnswer:
        body = message(protocol.ResetCheckout, instance=instance, commit=commit, dataset=dataset)
        answer = self._connection.request(
            "POST", f"checkouts/{quote(checkout, safe='')}/reset", body=body
        )
        return read_one(answer, protocol.ResetAnswer)

    def renew_checkout(
        self, checkout: str, ttl: timedelta | float | str | None = None
    ) -> protocol.Checkout:
        body = message(protocol.RenewCheckout, ttl=seconds_of(ttl))
        answer = self._connection.request(
            "POST", f"checkouts/{quote(checkout, safe='')}/renew", body=body
        )
        lease = read_one(answer, protocol.Checkout)
        self._renewal.move(lease.id, lease.expires_at)
        return lease

    def diff_checkout(self, checkout: str) -> bytes:
        return (self._connection.request("GET", f"checkouts/{quote(checkout, safe='')}/diff")).body

    def apply_patch(
        self, checkout: str, patch: bytes | str, *, reverse: bool = False
    ) -> protocol.Checkout:
        """Apply a patch, or one of the instance's own: `@test_patch`, `@patch`."""
        named = patch if isinstance(patch, str) and patch.startswith("@") else None
        content = patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch
        path = f"checkouts/{quote(checkout, safe='')}/apply"
        answer = self._connection.request(
            "POST", path, content=None if named else content, reverse=reverse, named=named
        )
        return read_one(answer, protocol.Checkout)

    def restore_paths(self, checkout: str, commit: str, *paths: str) -> list[str]:
        body = message(protocol.RestorePaths, commit=commit, paths=list(paths))
        answer = self._connection.request(
            "POST", f"checkouts/{quote(checkout, safe='')}/restore", body=body
        )
        return read_one(answer, protocol.RestoreAnswer).paths

    def release_checkout(self, checkout: str) -> None:
        self._renewal.drop(checkout)
        self._connection.request("DELETE", f"checkouts/{quote(checkout, safe='')}")

    # -- operations and events ----------------------------------------------------------------------------------------

    def list_operations(self) -> list[protocol.Operation]:
        return read_list(self._connection.request("GET", "operations"), protocol.Operation)

    def get_operation(self, operation: str) -> protocol.Operation:
        return read_one(
            self._connection.request("GET", f"operations/{quote(operation, safe='')}"),
            protocol.Operation,
        )

    def cancel_operation(self, operation: str) -> protocol.Operation:
        return read_one(
            self._connection.request("DELETE", f"operations/{quote(operation, safe='')}"),
            protocol.Operation,
        )

    def wait(
        self,
        operation: protocol.Operation | str,
        *,
        progress: Callable[[protocol.Operation], None] | None = None,
        timeout: timedelta | None = None,
    ) -> protocol.Operation:
        """The operation once it is done; raises the error it failed with, CancelledError when a restart of the daemon ended it.

        `progress` sees it each time it is asked after.
        """
        known = not isinstance(operation, str)
        identity = operation if isinstance(operation, str) else operation.id
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        pauses = retry_pauses(_POLL_SECONDS)
        while True:
            try:
                found = self.get_operation(identity)
            except OperationNotFoundError as error:
                if known:
                    raise _forgotten(identity) from error
                raise
            known = True
            if progress:
                progress(found)
            if found.state != "running":
                return _finished(found)
            if deadline and time.monotonic() > deadline:
                raise DeadlineError(
                    f"cannot wait longer for operation {identity}: it still runs",
                    hint="it goes on; ask again",
                )
            pause(next(pauses, _POLL_SECONDS))

    def events(
        self, *, after: str | None = None, follow: bool = True
    ) -> Generator[protocol.Event, None, None]:
        """What happens, as it happens, through restarts of the daemon. Starts behind `after` (BOOT:ID or ID), by default now.

        `follow=False` answers what the daemon remembers, and ends.
        """
        last = after
        pauses = retry_pauses(self._patience.total_seconds())
        while True:
            try:
                with closing(self._stream_events(last, follow)) as stream:
                    for event in stream:
                        pauses = retry_pauses(self._patience.total_seconds())
                        last = f"{event.boot}:{event.id}"
                        yield event
                if not follow:
                    return
            except NoDaemonError:
                if last is None or not follow:
                    raise
            if (seconds := next(pauses, None)) is None:
                raise NoDaemonError(
                    f"cannot follow events: the daemon at {self.socket} went away",
                    hint="see its log",
                )
            pause(seconds)

    def _stream_events(
        self, last: str | None, follow: bool
    ) -> Generator[protocol.Event, None, None]:
        reader = EventReader()
        headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
        with self._connection.stream("events", headers=headers, follow=follow) as (_, body):
            for piece in body:
                for event in reader.feed(piece):
                    yield event


def _mirror(name: str) -> str:
    """A mirror's name as one segment of a path, from any spelling. Whether it can be one is for the daemon to say."""
    return quote(name.replace("/", "__", 1), safe="")


def _forgotten(identity: str) -> CancelledError:
    return CancelledError(
        f"cannot finish operation {identity}: the daemon was restarted while it ran",
        hint="ask for it again",
        operation=identity,
    )


def _finished(operation: protocol.Operation) -> protocol.Operation:
    if operation.error is not None:
        raise from_problem(operation.error.to_json())
    if operation.state == "cancelled":
        raise CancelledError(
            f"cannot finish {operation.kind} of {operation.subject}: it was cancelled",
            operation=operation.id,
        )
    return operation
