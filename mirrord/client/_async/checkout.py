"""Handles of checkouts and grades, and the renewal of the leases of a client."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast
from weakref import WeakValueDictionary

from ... import model, protocol
from ...errors import CheckoutNotFoundError, MirrordError, TooLargeError
from ..http import seconds_of
from ..primitives_async import AsyncWorker, Pending, async_to_end
from .turns import AsyncEnding, AsyncFinished, turn_of

if TYPE_CHECKING:
    from .client import AsyncClient
    from .sandbox import AsyncSandbox


T = TypeVar("T")


class _LeaseMember(Generic[T]):
    """A member of the lease, as of the last answer."""

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, handle: AsyncCheckout, _owner: object = None) -> T:
        return cast("T", getattr(handle.lease, self._name))


class AsyncCheckout:
    """A leased working tree; leaving the `with` block releases it.

    The daemon releases it at `expires_at` (aware UTC). With `auto_renew` the client renews the
    lease in the background, as long as process, client and this handle live: also under a program
    that hangs. Methods raise subclasses of MirrordError, such as CheckoutNotFoundError once the
    lease has ended; `lease` is the daemon's last answer.

        async with mirrord.checkout("psf__requests-2317", ttl="10m") as checkout:
            (checkout.path / "setup.cfg").unlink()
            patch = await checkout.diff()
            proof = await checkout.reset()
    """

    def __init__(self, client: AsyncClient, lease: protocol.Checkout, ttl: float | None) -> None:
        self._client = client
        self._ttl = ttl
        self._at_exit: dict[str, Any] = {}
        self.lease = lease
        self.finished: AsyncFinished | None = None
        """What `at_exit` asked for, after the `with` block."""

    id = _LeaseMember[str]()
    mirror = _LeaseMember[str]()
    commit = _LeaseMember[str]()
    """The full id of the base commit."""
    tree = _LeaseMember[str]()
    """The verified hash of the base commit's tree."""
    instance = _LeaseMember[str | None]()
    layer = _LeaseMember[str | None]()
    """The prepared layer that it started with; `reset` and `diff` are relative to it."""
    environment = _LeaseMember[str | None]()
    """KEY@DIGEST of the environment; its prefix is `directory / "environment"`."""
    history = _LeaseMember[model.History]()
    view = _LeaseMember[model.View]()
    backend = _LeaseMember[model.Backend]()
    created_at = _LeaseMember[datetime]()
    expires_at = _LeaseMember[datetime]()
    parent = _LeaseMember[str | None]()
    """The id of the checkout that this one is a fork or a grade of."""

    @property
    def path(self) -> Path:
        """The path of the tree; resets do not change it."""
        return Path(self.lease.path)

    @property
    def directory(self) -> Path:
        """The directory of tree and environment; bind it with `rslave` to follow resets."""
        return Path(self.lease.directory)

    async def reset(
        self,
        instance: str | None = None,
        *,
        commit: str | None = None,
        dataset: str | None = None,
        to: str | None = None,
        layer: str | None = None,
        environment: str | None = None,
    ) -> protocol.Proof:
        """Reset the checkout, or move it to another instance or commit of the same mirror, or back
        `to` a snapshot. Unsaved changes are lost.

        The environment is reset too; layer and environment stay unless others are named. Returns
        the proof that tree and .git equal those of the template or snapshot.

        Example:
            await checkout.reset()
            await checkout.reset("psf__requests-863")
            await checkout.reset(to="s1")
        """
        choice = {"commit": commit, "dataset": dataset, "to": to, "layer": layer}
        answer = await self._client.reset_checkout(
            self.id, instance, environment=environment, **choice
        )
        self.lease = answer
        return answer.proof

    def fork(
        self,
        ttl: timedelta | float | str | None = None,
        snapshot: str | None = None,
        *,
        auto_renew: bool = True,
    ) -> Pending[AsyncCheckout]:
        """Lease a copy of this checkout, or of one of its snapshots.

        The fork has the same owner, history, view and backend; `lease.copied` counts the files.

        Example:
            async with checkout.fork(snapshot="s1") as fork:
                print(fork.path)
        """
        return self._client.fork_checkout(
            self.id, snapshot=snapshot, ttl=ttl, auto_renew=auto_renew
        )

    async def snapshot(self, name: str | None = None) -> protocol.Snapshot:
        """Save the content under a name, by default s1, s2 and so on, for `reset(to=name)`.

        Example:
            before = await checkout.snapshot()
            await checkout.reset(to=before.name)
        """
        return await self._client.make_snapshot(self.id, name)

    async def snapshots(self) -> list[protocol.Snapshot]:
        """Return the snapshots of this checkout, oldest first."""
        return await self._client.list_snapshots(self.id)

    async def remove_snapshot(self, name: str) -> None:
        """Remove a snapshot; forks of it stay."""
        await self._client.remove_snapshot(self.id, name)

    async def save(self, name: str) -> protocol.PreparedLayer:
        """Save the changes, those of the environment included, as a prepared layer.

        Other checkouts of the commit start with it by `layer=name`. A layer never changes.

        Example:
            await checkout.save("tools")
            async with mirrord.checkout("psf__requests-2317", layer="tools") as prepared:
                print(prepared.layer)
        """
        return await self._client.save_layer(self.id, name)

    # `format` is its name in the API; no builtin of that name is used here
    async def diff(self, *, format: model.DiffFormat = model.DiffFormat.PATCH) -> bytes:  # noqa: A002
        """Return the changes since the base commit and the layer, as a patch that git accepts.

        `format` also selects the output of `git diff --stat` or `--name-status`.

        Example:
            Path("fix.patch").write_bytes(await checkout.diff())
        """
        return await self._client.diff_checkout(self.id, format=format)

    async def apply(
        self,
        patch: bytes | str,
        *,
        reverse: bool = False,
        strategy: model.ApplyStrategy | None = None,
    ) -> model.FoundStrategy:
        """Apply a patch, or `@test_patch` or `@patch` of the instance (grader view).

        All of it is applied, or PatchConflictError is raised. By default a patch applies exactly,
        one of the instance tolerantly. Returns the strategy that applied it.

        Example:
            await checkout.apply(Path("fix.patch").read_bytes())
            await checkout.apply("@test_patch")
        """
        answer = await self._client.apply_patch(self.id, patch, reverse=reverse, strategy=strategy)
        self.lease = answer
        return answer.strategy

    async def restore(self, commit: str, *paths: str) -> list[str]:
        """Restore files of a pinned commit in the tree (grader view); returns their paths.

        Example:
            commit = "22623bd8c265b78b161542663ee980738441c307"
            await checkout.restore(commit, "tests", "setup.cfg")
        """
        return await self._client.restore_paths(self.id, commit, *paths)

    async def read(self, path: str) -> bytes:
        """Return the content of a file, also where the caller does not see `path`.

        `read`, `write`, `upload` and `download` start a sandbox for the call: for many files keep
        a `Sandbox`, which has the same methods.

        Example:
            text = (await checkout.read("setup.py")).decode()
        """
        async with self._sandbox() as sandbox:
            return await sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and its missing parents; raises PathNotFoundError.

        Example:
            await checkout.write("tests/test_new.py", b"def test(): pass\\n")
        """
        async with self._sandbox() as sandbox:
            await sandbox.write(path, data)

    async def upload(self, local: Path | str, path: str) -> None:
        """Copy a file or directory of the host to `path`.

        Example:
            await checkout.upload("/srv/fixtures", "tests/fixtures")
        """
        async with self._sandbox() as sandbox:
            await sandbox.upload(local, path)

    async def download(self, path: str, local: Path | str) -> None:
        """Copy a file or directory to the new path `local`; its links are the agent's.

        Example:
            await checkout.download("build/report", "report")
        """
        async with self._sandbox() as sandbox:
            await sandbox.download(path, local)

    def _sandbox(self) -> AsyncSandbox:
        from .sandbox import AsyncSandbox  # noqa: PLC0415  loaded only for files

        return AsyncSandbox(self)

    async def receipt(self) -> protocol.Receipt:
        """Return the receipt of the current state; keep its `canonical()` bytes.

        Example:
            Path("receipt.json").write_bytes((await checkout.receipt()).canonical())
        """
        return await self._client.get_receipt(self.id)

    def grade(
        self,
        *,
        dataset: str | None = None,
        policy: model.Policy | str | Mapping[str, str] | None = None,
        backend: model.Backend | None = None,
        ttl: timedelta | float | str | None = None,
        owner: int | None = None,
        bind: model.Bind = model.Bind.LEASE,
        attach: bool = False,
        sandbox: bool = False,
        auto_renew: bool = True,
    ) -> Pending[AsyncGrade]:
        """Lease a tree with the changes of this checkout and the instance's tests.

        Arguments are those of `Client.grade`. Run the tests as another user than the agent.

        Example:
            async with checkout.grade(policy="drop") as grade, AsyncSandbox(grade) as sandbox:
                done = await sandbox.exec("python -m pytest -q tests")
        """
        how: dict[str, Any] = {"policy": policy, "backend": backend, "ttl": ttl, "owner": owner}
        how |= {"attach": attach, "sandbox": sandbox, "dataset": dataset}
        return self._client.grade_checkout(self.id, **how, bind=bind, auto_renew=auto_renew)

    def ending(
        self,
        *,
        diff: bool | model.DiffFormat = False,
        grade: bool | Mapping[str, Any] = False,
        snapshot: bool | str = False,
        reset: bool | str | Mapping[str, Any] = False,
        release: bool = False,
    ) -> AsyncEnding:
        """Return the end of a turn here, for `Client.turn`; the steps are those of `finish`.

        Example:
            await mirrord.turn([checkout.ending(diff=True, reset=True)])
        """
        steps: dict[str, Any] = {"diff": diff, "grade": grade, "snapshot": snapshot}
        return AsyncEnding(self, turn_of(self.id, **steps, reset=reset, release=release))

    async def finish(
        self,
        *,
        diff: bool | model.DiffFormat = True,
        grade: bool | Mapping[str, Any] = False,
        snapshot: bool | str = False,
        reset: bool | str | Mapping[str, Any] = False,
        release: bool | None = None,
    ) -> AsyncFinished:
        """End a turn in one request: diff, grade, snapshot, then reset or release.

        `grade` may be the arguments of `grade`, `snapshot` a name. `reset` is True, the instance to
        move to, or the arguments of `reset`. By default the checkout is released, unless it is
        reset or has a snapshot made. Raises the error of the step that failed: then the checkout is
        still held, and a grade that was made is released.

        Example:
            finished = await checkout.finish(grade={"policy": "drop"}, reset="psf__requests-863")
            print(finished.diff, finished.grade)
        """
        if release is None:
            release = reset is False and not snapshot
        steps: dict[str, Any] = {"grade": grade, "snapshot": snapshot, "reset": reset}
        steps["release"] = release
        finished = (await self._client.turn([self.ending(diff=diff, **steps)])).turns[0]
        if diff and isinstance(finished.error, TooLargeError):  # it does not fit an answer
            form = model.DiffFormat.PATCH if diff is True else diff
            content = await self.diff(format=form)
            finished = (await self._client.turn([self.ending(**steps)])).turns[0]
            finished = replace(finished, diff=content)
        if finished.error is not None:
            if finished.grade is not None:
                await finished.grade.release()
            raise finished.error
        return finished

    def at_exit(
        self,
        *,
        diff: bool | model.DiffFormat = True,
        grade: bool | Mapping[str, Any] = False,
    ) -> None:
        """Let the end of the `with` block diff and grade in the request that releases.

        `finished` has the results. After an exception in the block there is a release alone.

        Example:
            async with mirrord.checkout("psf__requests-2317") as checkout:
                checkout.at_exit()
            print(checkout.finished)
        """
        self._at_exit = {"diff": diff, "grade": grade}

    async def attach(
        self,
        path: Path | str,
        *,
        environment: Path | str | None = None,
        pid: int | None = None,
    ) -> None:
        """Attach the tree to the directory `path` of this mount namespace, and the environment to
        another directory. They follow resets there.

        Needs CAP_SYS_ADMIN in the namespace, as after `unshare --user --map-root-user --mount`.
        With `pid`, for root only, the paths are those that the process sees in its namespace.

        Example:
            await checkout.attach("/testbed", environment="/opt/environment")
        """
        if environment is not None:
            target = model.Target.ENVIRONMENT
            await self._client.attach_checkout(self.id, environment, target=target, pid=pid)
        await self._client.attach_checkout(self.id, path, pid=pid)

    async def open_mount(self) -> int:
        """Return the descriptor of a mount of `directory`, for a child process to attach; the
        caller closes it.
        """
        return await self._client.open_mount(self.id)

    async def renew(self, ttl: timedelta | float | str | None = None) -> datetime:
        """Renew the lease for `ttl`, by default the last one given; returns the new deadline.

        Example:
            deadline = await checkout.renew("4h")
        """
        self._ttl = self._ttl if ttl is None else seconds_of(ttl)
        self.lease = await self._client.renew_checkout(self.id, self._ttl)
        return self.lease.expires_at

    async def release(self) -> None:
        """Release the checkout; does nothing if it was released or has expired."""
        try:
            await self._client.release_checkout(self.id)
        except CheckoutNotFoundError:
            return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _at: object) -> None:
        if self._at_exit and error is None:
            try:
                self.finished = await self.finish(**self._at_exit, release=True)
            except BaseException:
                await async_to_end(self.release())
                raise
            return
        try:
            await async_to_end(self.release())
        except MirrordError as failure:
            if error is None:
                raise
            error.add_note(f"mirrord could not release checkout {self.id}: {failure.message}")

    def __repr__(self) -> str:
        base = f"{self.mirror}@{self.commit[:12]}"
        return f"<{type(self).__name__} {self.id} {base} at {self.lease.path}>"


class AsyncGrade(AsyncCheckout):
    """A checkout with the base commit, the agent's change and the instance's tests.

    `report` is the daemon's full answer.

        async with checkout.grade(policy="drop") as grade:
            for change in grade.steering:
                print(change.rule, change.path)
    """

    def __init__(self, client: AsyncClient, report: protocol.Grade, ttl: float | None) -> None:
        super().__init__(client, report, ttl)
        self.report = report

    @property
    def steering(self) -> list[protocol.Steering]:
        """Changes that could steer the tests, each with its rule and what was done about it."""
        return self.report.steering

    @property
    def dropped(self) -> list[str]:
        """Paths of the change that the policy dropped from this tree."""
        return self.report.dropped

    @property
    def judged_by(self) -> Literal["loading", "names"]:
        """Whether its environment was asked what it loads, or names of paths were judged."""
        return self.report.judged_by

    @property
    def strategy(self) -> model.FoundStrategy | None:
        """The strategy that applied the patch; None for the grade of a checkout."""
        return self.report.strategy

    @property
    def tests_strategy(self) -> model.FoundStrategy | None:
        """The strategy that applied the instance's test patch; None if it has none."""
        return self.report.tests_strategy


class AsyncRenewal:
    """Renews the leases of a client when a third of the remaining time has passed.

    Handles are referenced weakly: a lease without a handle ends at its deadline. A failed renewal
    is logged and retried until the deadline. The lock is for threads, and never held over a wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # a handle that the program dropped must not live on, and be renewed, because of this
        self._held: WeakValueDictionary[str, AsyncCheckout] = WeakValueDictionary()
        # by the clock that nobody sets: when to renew, and when the lease ends
        self._due: dict[str, tuple[float, float]] = {}
        self._worker: AsyncWorker | None = None

    def hold(self, checkout: AsyncCheckout) -> None:
        with self._lock:
            self._held[checkout.id] = checkout
            self._due[checkout.id] = _next_renewal(_seconds_to(checkout.expires_at))
            if self._worker is None or not self._worker.is_running:
                self._worker = AsyncWorker(self._work)
            else:
                self._worker.wake()

    def move(self, checkout: str, expires_at: datetime) -> None:
        """Follow the new deadline of a lease."""
        self._schedule(checkout, _seconds_to(expires_at))

    def _schedule(self, checkout: str, left: float) -> None:
        with self._lock:
            if checkout in self._due:
                self._due[checkout] = _next_renewal(left)
                if self._worker is not None:
                    self._worker.wake()

    def drop(self, checkout: str) -> bool:
        """Stop renewing a lease; return whether it was renewed."""
        with self._lock:
            was_held = self._due.pop(checkout, None) is not None
            if was_held and self._worker is not None:
                self._worker.wake()
        return was_held

    async def stop(self) -> None:
        with self._lock:
            self._due.clear()
            worker, self._worker = self._worker, None
        if worker is not None:
            await worker.end()

    async def _work(self, worker: AsyncWorker) -> None:
        while True:
            # a copy: leases are added and dropped while one is renewed
            for identity, due in list(self._due.items()):
                if due[0] <= time.monotonic():
                    await self._renew(identity)
            with self._lock:
                # in the lock: who adds a lease next finds either this worker or none
                if not self._due:
                    self._worker = None
                    return
                pause = min(self._due.values())[0] - time.monotonic()
            await worker.wait(max(pause, 0))

    async def _renew(self, identity: str) -> None:
        checkout = self._held.get(identity)
        if checkout is None:
            self.drop(identity)
            return
        try:
            await checkout.renew()
        except MirrordError as error:
            if identity not in self._due:
                return  # it was released meanwhile
            import logging  # noqa: PLC0415  (4 of the 90 ms of imports of `mirrord exec`)

            message = "cannot renew checkout %s, which expires at %s: %s"
            logging.getLogger("mirrord").warning(message, identity, checkout.expires_at, error)
            left = self._due.get(identity, (0.0, 0.0))[1] - time.monotonic()
            if isinstance(error, CheckoutNotFoundError) or left <= 0:
                self.drop(identity)
            self._schedule(identity, left)


# of a lease that has expired, or lives for less than that: no loop without a pause
_RENEWAL_MIN_SECONDS = 0.05


def _next_renewal(left: float) -> tuple[float, float]:
    now = time.monotonic()
    # of what is left: after a failure the attempts come closer together
    return now + max(left / 3, _RENEWAL_MIN_SECONDS), now + left


def _seconds_to(expires_at: datetime) -> float:
    return (expires_at - model.utc_now()).total_seconds()
