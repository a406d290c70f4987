"""Operations: work that outlives its request, with an id, progress, a result or an error.

Ended operations are remembered until a client has seen their end, the last thousand also after
that. Nothing survives a restart: the work must tolerate a kill at any moment.
"""

import asyncio
import builtins
import secrets
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from typing import Any, Literal, TypeVar

import anyio
import structlog

from .. import errors
from ..errors import MirrordError
from ..git.command import low_priority
from ..model import shown, utc_now
from ..protocol import QUEUED, Operation, Problem, Progress, ProgressSink, to_json
from ..telemetry import log
from ..workers.turns import Askers
from .events import Events

# administrators start as many as they like; more are refused with 429 `too-many-requests`
RUNNING_OF_MEMBER = 16
# 300 of one member, started within 16 s, were all kept before there was a bound
KEPT_OF_MEMBER = 100


@dataclass(slots=True)
class _Tracked:
    operation: Operation
    owner_uid: int
    progress: Progress = field(default_factory=Progress)  # set by any thread
    published_at: float = 0.0
    is_seen: bool = False

    @property
    def is_running(self) -> bool:
        return self.operation.state == "running"

    def answer(self) -> Operation:
        """Return the current state, and mark an end as seen."""
        self.is_seen = not self.is_running
        return self.current()

    def current(self) -> Operation:
        return replace(self.operation, progress=self.progress)


# returns the result of its operation: a message or JSON values
T = TypeVar("T")
Work = Callable[[ProgressSink], Awaitable[object]]


# ended operations, in memory; the oldest go first
_KEPT = 1000
_KEPT_UNSEEN = 20_000  # a client may start thousands and then ask for one after the other
# as often as clients ask; what git reports in between is replaced by the next
_PROGRESS_INTERVAL_S = 0.25
# then the answer shows the operation as it is, running or not
_CANCEL_TIMEOUT_S = 5.0


class Operations:
    """The operations of a daemon. Belongs to one event loop; progress may come from any thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._records: dict[str, _Tracked] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        """Counts by kind and state."""
        self.is_stopping = False

    @property
    def running_count(self) -> int:
        """The number of running operations, without queued ones."""
        return len(self._tasks) - self.queued_count

    @property
    def queued_count(self) -> int:
        return sum(self._records[identity].progress.note == QUEUED for identity in self._tasks)

    def start(self, kind: str, subject: str, run: Work, *, owner_uid: int = 0) -> Operation:
        """Start `run` in the background. Raises StoppingError after `close`."""
        if self.is_stopping:
            raise errors.StoppingError(
                f"cannot start {kind} {subject}: the daemon is stopping",
                hint="try again in a moment",
            )
        operation = Operation(
            id=secrets.token_hex(8), kind=kind, subject=subject, state="running",
            progress=Progress(), started_at=utc_now(),
        )  # fmt: skip
        record = self._records[operation.id] = _Tracked(operation, owner_uid)
        self._forget_oldest()
        self._publish("operation.started", record)
        task = asyncio.get_running_loop().create_task(
            self._perform(record, run), name=f"{kind} {subject}"
        )
        self._tasks[operation.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(operation.id, None))
        return record.current()

    async def patiently(
        self,
        kind: str,
        subject: str,
        work: Callable[[ProgressSink], Coroutine[Any, Any, T]],
        *,
        owner_uid: int,
    ) -> T | Operation:
        """Return the result of a request's work, or the operation that it became after 10 s."""
        latest, sinks = Progress(), list[ProgressSink]()

        def relay(progress: Progress) -> None:
            nonlocal latest
            latest = progress
            for sink in sinks:
                sink(progress)

        task = await patiently(work(relay))
        if task.done():
            return task.result()

        async def run(sink: ProgressSink) -> T:
            sinks.append(sink)
            sink(latest)
            return await task

        try:
            return self.start(kind, subject, run, owner_uid=owner_uid)
        except errors.StoppingError:
            task.cancel()
            raise

    def admit_member(self, uid: int) -> None:
        """Raise TooManyRequestsError where a user who is no administrator has too many running.

        Forgets this user's oldest ended operations, seen or not, over a hundred.
        """
        own = {name: record for name, record in self._records.items() if record.owner_uid == uid}
        ended = [identity for identity, record in own.items() if not record.is_running]
        if len(own) - len(ended) >= RUNNING_OF_MEMBER:
            raise errors.TooManyRequestsError(
                f"cannot start another operation: {RUNNING_OF_MEMBER} of this user are running",
                hint="wait for one to end, or cancel one; see `mirrord operation list`",
                retry_after=5,
            )
        for identity in ended[: max(len(ended) - KEPT_OF_MEMBER + 1, 0)]:
            del self._records[identity]

    def get(self, identity: str, *, owner_uid: int | None = None) -> Operation:
        """Return an operation, of this user if given. Raises NotFoundError."""
        return self._get(identity, owner_uid).answer()

    def list(self, *, owner_uid: int | None = None) -> list[Operation]:
        """List all operations, or those of a user, newest first."""
        records = reversed(self._records.values())
        return [record.current() for record in records if owner_uid in {None, record.owner_uid}]

    def running(self, *, owner_uid: int | None = None) -> builtins.list[Operation]:
        """List running operations, oldest first, then queued ones."""
        records = [self._records[identity] for identity in self._tasks]
        visible = [record for record in records if owner_uid in {None, record.owner_uid}]
        return [
            record.current() for record in sorted(visible, key=lambda r: r.progress.note == QUEUED)
        ]

    async def wait(self, identity: str, *, timeout: timedelta | None = None) -> Operation:
        """Wait for the end of an operation up to `timeout`, and return it. Does not cancel it."""
        record = self._get(identity, None)
        if task := self._tasks.get(identity):
            await asyncio.wait([task], timeout=None if timeout is None else timeout.total_seconds())
        return record.answer()

    async def cancel(self, identity: str, *, owner_uid: int | None = None) -> Operation:
        """Cancel an operation and wait up to 5 s for its end. Raises ConflictError."""
        record = self._get(identity, owner_uid)
        task = self._tasks.get(identity)
        if task is None or not record.is_running:
            raise errors.ConflictError(
                f"cannot cancel operation {identity}: it is {record.operation.state}",
                hint="`mirrord operation list --running` shows those that can be cancelled",
            )
        await asyncio.sleep(0)  # a task cancelled before its first step could not clean up
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_TIMEOUT_S)
        return record.current()

    async def close(self, drain: timedelta = timedelta()) -> None:
        """Refuse new work, wait up to `drain` for running work, cancel what remains."""
        self.is_stopping = True
        # as in `cancel`: each task has to take its first step
        await asyncio.sleep(0)
        if self._tasks and drain:
            await asyncio.wait(self._tasks.values(), timeout=drain.total_seconds())
        if remaining := list(self._tasks.values()):
            for task in remaining:
                task.cancel()
            await asyncio.wait(remaining, timeout=_CANCEL_TIMEOUT_S)

    def _get(self, identity: str, owner_uid: int | None) -> _Tracked:
        record = self._records.get(identity)
        if record is None or owner_uid not in {None, record.owner_uid}:
            raise errors.NotFoundError(
                f"cannot find operation {shown(identity)}: none since the daemon's start",
                hint="operations do not survive a restart; see `mirrord operation list`",
                kind="operation",
            )
        return record

    async def _perform(self, record: _Tracked, run: Work) -> None:
        kind, subject = record.operation.kind, record.operation.subject
        work = f"{kind} {subject}"
        loop = asyncio.get_running_loop()

        def sink(progress: Progress) -> None:
            record.progress = progress
            now = loop.time()
            if now - record.published_at >= _PROGRESS_INTERVAL_S:
                record.published_at = now
                loop.call_soon_threadsafe(self._publish, "operation.progressed", record)

        structlog.contextvars.bind_contextvars(operation=record.operation.id)
        Askers().bind()  # counted as background work, not for the user who asked
        state: Literal["done", "failed", "cancelled"] = "failed"
        result: dict[str, Any] | None = None
        problem: errors.MirrordError | None = None
        try:
            result = to_json(await run(sink))
            state = "done"
        except asyncio.CancelledError:
            state = "cancelled"
            problem = errors.CancelledError(f"cannot finish {work}: it was cancelled")
        except errors.MirrordError as error:
            problem = error
        except Exception as error:
            problem = errors.unexpected(error, f"finish {work}")
            if isinstance(problem, errors.InternalError):  # a full or failed disk is no bug
                log.exception("operation.crashed", kind=kind, subject=subject)
        failure = Problem.from_json(problem.problem()) if problem else None
        record.operation = replace(
            record.operation, state=state, result=result, error=failure, finished_at=utc_now()
        )
        self.ended[kind, state] += 1
        self._publish("operation.finished", record)

    def _publish(self, name: str, record: _Tracked) -> None:
        operation = record.operation
        fields: dict[str, Any] = {"operation": operation.id, "kind": operation.kind}
        fields |= {"subject": operation.subject, "state": operation.state}
        if name == "operation.progressed":
            if not record.is_running:
                return
            fields["progress"] = record.progress.to_json()
        if operation.error:
            fields |= {"code": operation.error.code, "detail": operation.error.detail}
        if operation.finished_at:
            took = operation.finished_at - operation.started_at
            fields["duration_s"] = round(took.total_seconds(), 3)
        self._events.publish(name, owner_uid=record.owner_uid, **fields)

    def _forget_oldest(self) -> None:
        surplus = len(self._records) - _KEPT
        if surplus <= 0:
            return
        records = self._records.items()
        seen = (identity for identity, record in records if record.is_seen)
        ended = (identity for identity, record in records if not record.is_running)
        unseen_surplus = max(len(self._records) - _KEPT_UNSEEN, 0)
        for identity in [*islice(seen, surplus)] or [*islice(ended, unseen_surplus)]:
            del self._records[identity]


# -- deferred work: started after the answer of the current request, one piece at a time -----------
#
# It makes later requests faster. If it fails or is cancelled, nothing is lost.

_answered: ContextVar[asyncio.Event | None] = ContextVar("answered", default=None)


@contextmanager
def answering() -> Iterator[None]:
    """Hold back work deferred in the block, or in tasks started there, until its end."""
    answered = asyncio.Event()
    token = _answered.set(answered)
    try:
        yield
    finally:
        _answered.reset(token)
        answered.set()


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A group whose first failure cancels the others and is raised without a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def together(works: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run all concurrently. The first failure cancels the others and is raised."""
    async with task_group() as group:
        for work in works:
            group.create_task(work)


# a store or an upstream may be silent for a minute, and a first fetch takes longer
_ANSWER_WITHIN_S = 10.0


async def patiently(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Give work of a request some seconds to end; what takes longer is for an operation."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task], timeout=_ANSWER_WITHIN_S)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task


class Deferred:
    """A queue of deferred work. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._turn = anyio.Lock()

    def begin(self, key: tuple[str, Hashable], work: Callable[[], Awaitable[None]]) -> None:
        """Defer `work`, unless the same key (a kind and an object) is already queued."""

        async def perform() -> None:
            Askers().bind()
            if answered := _answered.get():
                await answered.wait()
            try:
                async with self._turn:
                    with low_priority():
                        await work()
            except (MirrordError, OSError) as error:  # its mirror or store may be gone
                log.info("deferred.failed", kind=key[0], which=str(key[1]), error=str(error))

        if key not in self._tasks:
            self._tasks[key] = task = asyncio.get_running_loop().create_task(perform())
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
