"""Builds of environments: the checkout, the builder, the adopted result, and its preparation.

An environment appears by one rename when it is complete. A cancelled build removes its scratch
directory; after a kill the next start removes it, and the build's checkout ends with the daemon.
"""

import json
import os
import platform
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import anyio
import anyio.to_thread

from .. import protocol
from ..checkouts.prepared import layer_name
from ..checkouts.service import Checkouts
from ..errors import EnvironmentFailedError, LimitReachedError, TooLargeError, full_disk_named
from ..host.peers import Peer, own_process
from ..mirrors.service import Mirrors
from ..model import CommitId, EnvironmentName, MirrorName
from ..presence import matching
from ..protocol import Recipe, SaveLayer
from ..seal.scan import scan_environment
from ..telemetry import masked
from ..templates.adoption import adopt, sweep_shared
from ..templates.environments import RECORD, EnvironmentRecord, EnvironmentStore
from .builder import TIMEOUT, build_owner, find_uv, run_builder
from .lacks import lacks_of
from .preparations import Preparations
from .steps import Order

# the rest of a build's output is dropped, except the last lines, which the error quotes
_LOG_BYTES = 8 << 20
_TAIL_LINES = 30


class Plan(NamedTuple):
    """An environment to build, of a recipe without `-r` lines.

    It is built in a checkout of `commit`, if given, and prepared for the base commits `bases`.
    """

    recipe: Recipe
    digest: str
    mirror: MirrorName | None
    commit: CommitId | None
    bases: tuple[CommitId, ...]

    @property
    def name(self) -> str:
        return str(EnvironmentName(self.recipe.key, self.digest))

    @property
    def commands(self) -> list[str]:
        """The commands to run in the tree of an instance."""
        return [*self.recipe.pre_install, *self.recipe.install]

    @property
    def layer(self) -> str:
        return layer_name(self.digest)


class BuildLog:
    """The output of a build, bounded, with secrets in URLs masked; `tail` has the last lines."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        # preparations continue the log of the build, within its bound
        self._left = _LOG_BYTES - file.tell()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> "Iterator[BuildLog]":
        with path.open("ab") as file:
            yield cls(file)

    def say(self, text: str) -> None:
        text = masked(text)
        self.tail.append(text.rstrip("\n"))
        line = text.encode(errors="replace")
        if 0 < self._left <= len(line):
            line = b"the log is too long; the rest is left out\n"
            self._left = len(line)
        if self._left > 0:
            self._left -= len(line)
            self._file.write(line)
            self._file.flush()


class _Running(NamedTuple):
    plan: Plan
    path: Path
    began_at: datetime


# every file is hashed and linked; a sweep looks at every shared file
_ADOPT_TIMEOUT = timedelta(minutes=30)
# recorded with the environment; the count of all of them is published
_FINDINGS = 200


@dataclass(kw_only=True, eq=False, repr=False)
class Builds:
    """Builds environments for one store, with caches and scratch directories below `place`.

    `service` is the socket of the build service. Belongs to one event loop.
    """

    place: Path
    service: Path
    store: EnvironmentStore
    checkouts: Checkouts
    mirrors: Mirrors
    _running: dict[str, _Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mirrors = self.mirrors
        self.workers, self.events, self.trash = mirrors.workers, mirrors.events, mirrors.trash
        self.settings = mirrors.settings
        self.preparations = Preparations(self.store, self.checkouts.prepared)

    def open(self) -> None:
        """Remove the scratch directories of an earlier daemon. In a thread."""
        with suppress(FileNotFoundError):
            for path in (self.place / "builds").iterdir():
                self.trash.remove(path)

    # -- running builds ----------------------------------------------------------------------------

    def running(self) -> list[protocol.Environment]:
        return [
            protocol.Environment(
                key=plan.recipe.key, name=plan.name, digest=plan.digest, state="building",
                python=plan.recipe.python, mirror=str(plan.mirror) if plan.mirror else None,
                commit=plan.commit, built_at=began_at,
            )
            for plan, _, began_at in self._running.values()
        ]  # fmt: skip

    def find_log(self, digest: str) -> Path | None:
        """Return the log of a running build."""
        running = self._running.get(digest)
        return running.path / "log" if running else None

    def made_with(self, recipe: Recipe) -> list[Any]:
        """Return what a build depends on besides its recipe: after a change a failed build is
        repeated.
        """
        settings, interpreter = self.settings().environments, find_interpreter(recipe.python)
        changed_at = os.stat(interpreter).st_mtime_ns if interpreter else None
        return [interpreter, changed_at, settings.index, settings.network]

    # -- building ----------------------------------------------------------------------------------

    async def build(self, plan: Plan) -> EnvironmentRecord:
        """Build an environment and add it to the store.

        A failure is added too, and raised as EnvironmentFailedError.
        """
        began, path = time.time(), self.store.new_path()
        path.mkdir(mode=0o700)
        self._running[plan.digest] = _Running(plan, path, datetime.now(UTC))
        self.events.publish("environment.started", key=plan.recipe.key, digest=plan.digest)
        content: dict[str, Any] = {
            "key": plan.recipe.key, "digest": plan.digest, "recipe": plan.recipe.to_json(),
            "mirror": str(plan.mirror) if plan.mirror else None, "commit": plan.commit,
            "interpreter": find_interpreter(plan.recipe.python),
            "made_with": self.made_with(plan.recipe),
        }  # fmt: skip
        try:
            with BuildLog.opened(path / "log") as log:
                failure = await self._make(plan, path, log, content)
            content |= {"state": "failed" if failure else "ready", "error": failure}
            content |= {"tail": [*log.tail] if failure else [], "at": time.time()}
            content["duration_s"] = round(content["at"] - began, 3)
            with full_disk_named("an environment"):
                (path / RECORD).write_text(json.dumps(content))
            record = self.store.add(path, plan.digest)
        finally:
            del self._running[plan.digest]
            self.trash.add(path)
        names = ["key", "digest", "duration_s"]
        if failure:
            fields = {name: content[name] for name in names}
            self.events.publish("environment.failed", **fields, detail=failure)
            raise failed(plan, failure, content["tail"])
        names += ["files", "size_bytes", "shared_bytes"]
        self.events.publish("environment.built", **{name: content[name] for name in names})
        return record

    async def _make(
        self, plan: Plan, path: Path, log: BuildLog, content: dict[str, Any]
    ) -> str | None:
        """Have the builder make the prefix, and adopt it; return what failed."""
        async with self.scratch() as scratch:
            prefix, tree = scratch / "prefix", scratch / "tree"
            if plan.mirror is None:
                failure = await self.run(plan, tree, prefix, scratch, log)
            else:
                async with self.checkout(plan, plan.commit) as checkout:
                    tree = Path(checkout.path)
                    failure = await self.run(plan, tree, prefix, scratch, log)
            if failure is None:
                log.say("== adopting it\n")
                try:
                    adopted = await self.workers.run(
                        adopt, prefix, tree, path, self.store.shared, timeout=_ADOPT_TIMEOUT
                    )
                except LimitReachedError as error:
                    return error.message
                content |= adopted._asdict()
                for reason, count in adopted.dropped.items():
                    log.say(f"left out {count}: {reason}\n")
                if plan.commit:
                    content["findings"] = await self.scan(path / "files", plan, plan.commit)
        return failure

    async def scan(self, prefix: Path, plan: Plan, commit: CommitId) -> list[dict[str, Any]]:
        """Return the leaks in a prefix that is used at `commit`: content of later commits."""
        if plan.mirror is None:
            return []
        git_dir = self.mirrors.path(plan.mirror)
        # 10,457 files take 1.3 s where the mirror has none of them
        leaks = await self.workers.run(scan_environment, prefix, git_dir, commit)
        if leaks:
            fields = {"key": plan.recipe.key, "digest": plan.digest, "count": len(leaks)}
            self.events.publish("environment.leaks", **fields)
        return [leak.to_json() for leak in leaks[:_FINDINGS]]

    async def run(
        self, plan: Plan, tree: Path, prefix: Path, scratch: Path, log: BuildLog,
        commands: list[str] | None = None,
    ) -> str | None:  # fmt: skip
        """Make the prefix, or run `commands` with it; return what failed."""
        recipe, settings = plan.recipe, self.settings().environments
        cache = self.place / "cache" / str(plan.mirror or "none")
        await anyio.to_thread.run_sync(_make_private, cache)
        order = Order(
            tree=str(tree), environment=str(prefix), scratch=str(scratch), uv=find_uv(),
            cache=str(cache), python=recipe.python, interpreter=find_interpreter(recipe.python),
            index=settings.index, network=settings.network, index_date=recipe.index_date,
            requirements=recipe.requirements, packages=recipe.packages, commands=commands or [],
            variables=recipe.variables,
        )  # fmt: skip
        return await run_builder(order, self.service, log.say)

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """Make a directory of the build's user, with `home`, `tmp`, `tree` and `prefix`."""
        path = self.place / "builds" / secrets.token_hex(8)

        def make() -> None:
            for part in (path, *(path / name for name in ("home", "tmp", "tree", "prefix"))):
                _make_private(part)

        try:
            with full_disk_named("the scratch directory of a build"):
                await anyio.to_thread.run_sync(make)
            yield path
        finally:
            self.trash.add(path)

    @asynccontextmanager
    async def checkout(
        self, plan: Plan, commit: CommitId | None, environment: str | None = None
    ) -> AsyncIterator[protocol.Checkout]:
        """Make a checkout for the build's user; it ends with the block, or with this process."""
        request = protocol.StartCheckout(
            mirror=str(plan.mirror), commit=commit, owner=build_owner()[0],
            # longer than the build, which has to end first
            ttl=TIMEOUT.total_seconds() * 1.5, environment=environment,
        )  # fmt: skip
        checkout = await self.checkouts.checkout(request, own_peer(), own_process())
        try:
            yield checkout
        finally:
            with anyio.CancelScope(shield=True):
                await self.checkouts.release(checkout.id, own_peer())

    # -- preparations ------------------------------------------------------------------------------

    def needs_preparation(self, plan: Plan, base: CommitId) -> bool:
        """Return whether the recipe has commands for a commit that has no layer."""
        ready = [
            preparation.commit
            for preparation in self.preparations.list(plan.digest)
            if preparation.layer
        ]
        return bool(plan.mirror and plan.commands and base not in ready)

    async def prepare(self, plan: Plan, base: CommitId, *, again: bool) -> None:
        """Run the recipe's commands in a checkout, and save their changes as a layer.

        Raises EnvironmentFailedError if they fail, or failed before and nothing has changed.
        """
        key, preparations = f"{plan.mirror}@{base}", self.preparations.read(plan.digest)
        made_with = self.made_with(plan.recipe)
        before = preparations.get(key, {})
        if not again and "error" in before and before["made_with"] == made_with:
            raise failed(plan, before["error"], before["tail"], "earlier; nothing has changed")
        began = time.perf_counter()
        outcome: dict[str, Any] = {"made_with": made_with}
        with BuildLog.opened(self.store.root / plan.digest / "log") as log:
            log.say(f"== preparing {key}\n")
            failure = await self._run_commands(plan, base, log)
        if failure:
            outcome |= {"error": failure, "tail": [*log.tail]}
        elif base != plan.commit:  # the build has scanned it for that one
            prefix = self.store.directory(plan.digest)
            outcome["findings"] = await self.scan(prefix, plan, base)
        self.preparations.write(plan.digest, key, outcome)
        fields = {"key": plan.recipe.key, "digest": plan.digest, "mirror": str(plan.mirror)}
        duration_s = round(time.perf_counter() - began, 3)
        if failure:
            self.events.publish("environment.failed", **fields, commit=base, detail=failure)
            raise failed(plan, failure, outcome["tail"])
        self.events.publish("environment.prepared", **fields, commit=base, duration_s=duration_s)

    async def _run_commands(self, plan: Plan, base: CommitId, log: BuildLog) -> str | None:
        async with self.scratch() as scratch, self.checkout(plan, base, plan.name) as checkout:
            prefix = Path(checkout.directory) / "environment"
            failure = await self.run(plan, Path(checkout.path), prefix, scratch, log, plan.commands)
            if failure is None:
                try:
                    await self.checkouts.save(checkout.id, SaveLayer(name=plan.layer), own_peer())
                except TooLargeError as error:  # of the recipe's making
                    return error.message
        return failure

    # -- caches ------------------------------------------------------------------------------------

    def caches(self) -> list[Path]:
        """Return the directories of downloads, one for each mirror."""
        return sorted(matching(self.place / "cache", "*"))

    async def drop_caches(self) -> None:
        """Remove downloads and unused shared files, unless a build runs."""
        if not self._running:
            self.trash.add(*await anyio.to_thread.run_sync(self.caches))
            await self.sweep()

    async def sweep(self) -> None:
        """Remove the shared files that no environment uses, unless a build runs, which may be about
        to link them.
        """
        await self.trash.settle()
        if not self._running:
            await self.workers.run(sweep_shared, self.store.shared, timeout=_ADOPT_TIMEOUT)


def find_interpreter(version: str) -> str | None:
    """Return the host's Python of a version; None if uv has to fetch one."""
    short = ".".join(version.split(".")[:2])
    is_exact = version in (short, platform.python_version())
    # sandboxes show all of /usr; in /usr/local is what `make altinstall` and images of Python have
    paths = [f"{above}/bin/python{short}" for above in ("/usr", "/usr/local")]
    return next((path for path in paths if is_exact and os.access(path, os.X_OK)), None)


def failed(plan: Plan, fact: str, tail: Iterable[str], note: str = "") -> EnvironmentFailedError:
    missing = lacks_of(plan.recipe, fact, tail)
    return EnvironmentFailedError(
        f"cannot build environment {plan.name}: {fact}{f' ({note})' if note else ''}",
        missing=[each.to_json() for each in missing],
        hint=f"see `mirrord environment log {plan.name}`; `mirrord environment build --again`",
        key=plan.recipe.key,
        digest=plan.digest,
    )


def own_peer() -> Peer:
    return Peer(os.geteuid(), os.getegid(), os.getpid())


def _make_private(path: Path) -> None:
    """Make a directory for the build's user alone, below directories that all may traverse."""
    for above in (path.parent.parent, path.parent):
        above.mkdir(mode=0o711, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    os.chown(path, *build_owner())
