"""Work that outlives the request which asked for it: an id, progress, a result or an error, and a way to cancel it.

Owns the tasks of all running operations, and remembers those that ended until somebody has seen how, the last thousand also
after that. Never knows what the work is. Nothing survives a restart: the work itself must stand being killed at any moment, so an
operation is only how it is watched.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

import structlog

from ..errors import (
    CancelledError,
    InternalError,
    MirrordError,
    OperationFinishedError,
    OperationNotFoundError,
    StoppingError,
)
from ..git.turns import Askers
from ..host.files import host_error
from ..model import shown, utc_now
from ..protocol import QUEUED, Operation, Problem, Progress, ProgressSink
from .events import Events

log = structlog.get_logger()

Work = Callable[[ProgressSink], Awaitable[dict[str, Any] | None]]
State = Literal["running", "done", "failed", "cancelled"]

_KEPT = 1000
_KEPT_UNSEEN = 20_000
"""Somebody who waits for thousands asks for one after the other; what nobody ever asks for must not fill the memory."""
_PROGRESS_INTERVAL_S = 0.25
_CANCEL_BOUND_S = 5.0


@dataclass(slots=True)
class _Record:
    id: str
    kind: str
    subject: str
    owner_uid: int
    started_at: datetime
    state: State = "running"
    progress: Progress = field(default_factory=Progress)
    result: dict[str, Any] | None = None
    error: Problem | None = None
    finished_at: datetime | None = None
    told_at: float = 0.0
    is_seen: bool = False

    def answer(self) -> Operation:
        return Operation(
            id=self.id,
            kind=self.kind,
            subject=self.subject,
            state=self.state,
            progress=self.progress,
            result=self.result,
            error=self.error,
            started_at=self.started_at,
            finished_at=self.finished_at,
        )


class Operations:
    """All background work that has an id. Belongs to one event loop; a progress sink may be called from any thread."""

    def __init__(self, events: Events, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._events = events
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    @property
    def is_stopping(self) -> bool:
        """Whether `close` was called."""
        return self._stopping

    @property
    def running_count(self) -> int:
        """Those at work; what waits for its turn is none of them."""
        return len(self._tasks) - self.queued_count

    @property
    def queued_count(self) -> int:
        return sum(self._records[identity].progress.note == QUEUED for identity in self._tasks)

    def start(self, kind: str, subject: str, run: Work, *, owner_uid: int = 0) -> Operation:
        """Run `run` in the background. Raises StoppingError once `close` was called."""
        if self._stopping:
            raise StoppingError(
                f"cannot start {kind} {subject}: the daemon is stopping",
                hint="ask again in a moment",
            )
        record = _Record(secrets.token_hex(8), kind, subject, owner_uid, self._clock())
        self._records[record.id] = record
        self._forget_oldest()
        self._tell("operation.started", record)
        task = asyncio.get_running_loop().create_task(
            self._perform(record, run), name=f"{kind} {subject}"
        )
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))
        return record.answer()

    def get(self, identity: str, *, owner_uid: int | None = None) -> Operation:
        """One operation; with `owner_uid`, only that user's. Raises OperationNotFoundError."""
        return self._seen(self._get(identity, owner_uid))

    def list(self, *, owner_uid: int | None = None) -> list[Operation]:
        """All that run and the last that ended, newest first; with `owner_uid`, only that user's."""
        seen = (
            record
            for record in reversed(self._records.values())
            if owner_uid in {None, record.owner_uid}
        )
        return [record.answer() for record in seen]

    async def wait(self, identity: str, *, timeout: timedelta | None = None) -> Operation:
        """The operation once it has ended, or as it is after `timeout`. Giving up waiting does not cancel it."""
        record = self._get(identity, None)
        if task := self._tasks.get(identity):
            await asyncio.wait([task], timeout=None if timeout is None else timeout.total_seconds())
        return self._seen(record)

    async def cancel(self, identity: str, *, owner_uid: int | None = None) -> Operation:
        """Cancel, and wait a bounded time for the work to end. Raises OperationFinishedError when it had ended."""
        record = self._get(identity, owner_uid)
        task = self._tasks.get(identity)
        if task is None or record.state != "running":
            raise OperationFinishedError(
                f"cannot cancel operation {identity}: it is {record.state}"
            )
        await asyncio.sleep(0)  # work that has not begun could not tidy up
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_BOUND_S)
        return record.answer()

    async def close(self, drain: timedelta = timedelta()) -> None:
        """Take no more, give what runs the time `drain` to end, cancel the rest and wait for it a bounded time."""
        self._stopping = True
        await asyncio.sleep(0)
        if self._tasks and drain:
            await asyncio.wait(self._tasks.values(), timeout=drain.total_seconds())
        remaining = list(self._tasks.values())
        for task in remaining:
            task.cancel()
        if remaining:
            await asyncio.wait(remaining, timeout=_CANCEL_BOUND_S)

    def _seen(self, record: _Record) -> Operation:
        record.is_seen = record.state != "running"
        return record.answer()

    def _get(self, identity: str, owner_uid: int | None) -> _Record:
        record = self._records.get(identity)
        if record is None or owner_uid not in {None, record.owner_uid}:
            raise OperationNotFoundError(
                f"cannot find operation {shown(identity)}: no such operation since the daemon started",
                hint="operations are forgotten at a restart; see GET /v1/operations",
            )
        return record

    async def _perform(self, record: _Record, run: Work) -> None:
        structlog.contextvars.bind_contextvars(operation=record.id)
        Askers().bind()  # background work, whoever asked for it
        try:
            record.result = await run(self._sink(record))
            self._end(record, "done")
        except asyncio.CancelledError:
            error = CancelledError(
                f"cannot finish {record.kind} {record.subject}: it was cancelled"
            )
            self._end(record, "cancelled", error)
        except MirrordError as error:
            self._end(record, "failed", error)
        except Exception as error:
            found = host_error(error, f"finish {record.kind} {record.subject}")
            log.exception("operation.crashed", kind=record.kind, subject=record.subject)
            self._end(record, "failed", found or _bug(record))

    def _sink(self, record: _Record) -> ProgressSink:
        loop = asyncio.get_running_loop()

        def sink(progress: Progress) -> None:
            record.progress = progress
            now = loop.time()
            if now - record.told_at >= _PROGRESS_INTERVAL_S:
                record.told_at = now
                loop.call_soon_threadsafe(self._tell, "operation.progressed", record)

        return sink

    def _end(self, record: _Record, state: State, error: MirrordError | None = None) -> None:
        record.state = state
        record.error = Problem.from_json(error.problem()) if error else None
        record.finished_at = self._clock()
        self._tell("operation.finished", record)

    def _tell(self, name: str, record: _Record) -> None:
        fields: dict[str, Any] = {
            "operation": record.id,
            "kind": record.kind,
            "subject": record.subject,
            "state": record.state,
        }
        if name == "operation.progressed" and record.state == "running":
            fields["progress"] = record.progress.to_json()
        elif name == "operation.progressed":
            return
        if record.error:
            fields |= {"code": record.error.code, "detail": record.error.detail}
        if record.finished_at:
            fields["duration_s"] = round(
                (record.finished_at - record.started_at).total_seconds(), 3
            )
        self._events.publish(name, owner_uid=record.owner_uid, **fields)

    def _forget_oldest(self) -> None:
        if len(self._records) <= _KEPT:
            return
        ended = [record for record in self._records.values() if record.state != "running"]
        seen = [record for record in ended if record.is_seen]
        for record in (
            seen[: max(len(self._records) - _KEPT, 0)]
            or ended[: max(len(self._records) - _KEPT_UNSEEN, 0)]
        ):
            del self._records[record.id]


def _bug(record: _Record) -> InternalError:
    return InternalError(
        f"cannot finish {record.kind} {record.subject}: an unexpected error",
        hint="this is a bug; the daemon's log has the details",
    )
