"""Find the tips that a damaged upstream cannot give, so that all others arrive.

One damaged object upstream makes a fetch of everything fail. `find_bad` asks for ever smaller
groups: where a failure shows which items share its cause, those are left out and the rest is asked
for again, a step for each cause; where it shows nothing, groups are halved, and small ones tried
item by item, several at a time.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TypeVar

import anyio

from .. import errors
from ..errors import MirrordError, UpstreamThrottledError

T = TypeVar("T")
Lane = Callable[[], AbstractAsyncContextManager[object]]


async def find_bad(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Awaitable[None]],
    *,
    is_theirs: Callable[[MirrordError], bool],
    budget: int,
    hopeless: int,
    blame: Callable[[MirrordError, Sequence[T]], Awaitable[Collection[T]]] | None = None,
    sort: Callable[[Sequence[T]], Sequence[T] | None] = lambda _: None,
    lane: Lane = nullcontext,
) -> dict[T, MirrordError]:
    """Call `attempt` on `items`, then on ever smaller groups; answers the items that failed.

    An error that is not theirs, the items', is raised. `blame` answers all items that certainly
    fail for the cause of a group's failure; `sort` puts those first that make others fail, or
    answers None where that is unknown. Each call beside another one holds a `lane`. The rest gets
    the last error untried after `budget` failures, or when `hopeless` single items failed before
    anything succeeded.
    """
    bad: dict[T, MirrordError] = {}
    waiting: list[Sequence[T]] = [items]
    failures = alone = 0
    any_whole = False

    async def ask(group: Sequence[T]) -> MirrordError | None:
        try:
            await attempt(group)
        except MirrordError as error:
            if not is_theirs(error):
                raise
            return error
        return None

    async def note(group: Sequence[T], error: MirrordError) -> None:
        nonlocal failures, alone
        failures, alone = failures + 1, alone + (len(group) == 1)
        blamed = set(group) if len(group) == 1 else set[T]()
        blamed.update(await blame(error, group) if blame else ())
        bad.update({item: error for item in items if item in blamed and item not in bad})

    while waiting:
        group = [item for item in waiting.pop() if item not in bad]
        error = await ask(group) if group else None
        if error is None:
            any_whole = any_whole or bool(group)
            continue
        await note(group, error)
        rest = [item for item in group if item not in bad]
        arranged = sort(rest)
        if failures > budget or (not any_whole and alone >= hopeless):
            untried = "cannot ask for it by itself: too many others failed"
            bad |= dict.fromkeys(rest, type(error)(untried, hint=error.hint))
        elif len(rest) < len(group) and failures <= 3:  # later, the rest is halved even so
            waiting.append(rest)
        elif arranged is None and len(rest) <= 8:
            found = await _ask_each(rest, ask, lane)
            any_whole = any_whole or len(found) < len(rest)
            for item, why in found.items():
                await note([item], why)
        else:
            # where nothing is known of them, the first is the likeliest, and makes the rest cheaper
            middle = 1 if failures == 1 and arranged is None else len(rest) // 2
            arranged = arranged or rest
            waiting += [arranged[middle:], arranged[:middle]]
    return bad


async def _ask_each(
    items: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[MirrordError | None]], lane: Lane
) -> dict[T, MirrordError]:
    """Ask in the caller's own lane, helped by others for as long as there are free lanes."""
    queue, failed, idle = list(items), dict[T, MirrordError](), set[anyio.CancelScope]()

    async def work() -> None:
        while queue:
            item = queue.pop(0)
            if error := await ask([item]):
                failed[item] = error

    async def help_out() -> None:
        with anyio.CancelScope() as scope:
            idle.add(scope)
            try:
                async with lane():
                    idle.discard(scope)
                    await work()
            except UpstreamThrottledError:
                if scope not in idle:
                    raise

    try:
        async with anyio.create_task_group() as tasks:
            for _ in items[1:4]:
                tasks.start_soon(help_out)
            await work()
            for scope in idle:
                scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    return failed


_WHOLE_UPSTREAM = (
    errors.UpstreamAuthError, errors.UpstreamNotFoundError, errors.UpstreamThrottledError,
    errors.UpstreamTimeoutError, errors.UpstreamEmptyError, errors.DiskFullError,
    errors.GitKilledError,
)  # fmt: skip
_CONNECTION = re.compile(
    r"could not resolve|failed to connect|couldn't connect|unable to connect|unable to access"
    r"|connection (refused|reset)|no route to host|network is unreachable|returned error: 5"
    r"|SSL (certificate|connect|routines)",
    re.IGNORECASE,
)


def blames_objects(error: MirrordError) -> bool:
    """Whether some of the wanted objects may be the cause, so that others could come."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)
