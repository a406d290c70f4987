"""Find the tips that a damaged upstream cannot give, so that all others arrive.

One damaged object upstream makes a fetch of everything fail. `find_bad` asks for ever smaller
groups: where a failure shows which items share its cause, those are left out and the rest is asked
for again, a step for each cause; where it shows nothing, groups are halved, and small ones tried
item by item.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from .. import errors
from ..errors import MirrordError

T = TypeVar("T")


async def find_bad(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Awaitable[None]],
    *,
    is_theirs: Callable[[MirrordError], bool],
    budget: int,
    hopeless: int,
    blame: Callable[[MirrordError, Sequence[T]], Awaitable[Collection[T]]] | None = None,
    sort: Callable[[Sequence[T]], Sequence[T] | None] = lambda _: None,
) -> dict[T, MirrordError]:
    """Call `attempt` on `items`, then on ever smaller groups; answers the items that failed.

    An error that is not theirs, the items', is raised. `blame` answers all items that certainly
    fail for the cause of a group's failure; `sort` puts those first that make others fail, or
    answers None where that is unknown. The rest gets the last error untried after `budget`
    failures, or when `hopeless` single items failed before anything succeeded.
    """
    bad: dict[T, MirrordError] = {}
    waiting: list[Sequence[T]] = [items]
    failures = alone = 0
    any_whole = False
    while waiting:
        if not (group := [item for item in waiting.pop() if item not in bad]):
            continue
        try:
            await attempt(group)
            any_whole = True
            continue
        except MirrordError as raised:
            if not is_theirs(raised):
                raise
            error = raised
        failures, alone = failures + 1, alone + (len(group) == 1)
        blamed = set(group) if len(group) == 1 else set[T]()
        blamed.update(await blame(error, group) if blame else ())
        bad.update({item: error for item in items if item in blamed and item not in bad})
        rest = [item for item in group if item not in bad]
        arranged = sort(rest)
        if failures > budget or (not any_whole and alone >= hopeless):
            untried = "cannot ask for it by itself: too many others failed"
            bad |= dict.fromkeys(rest, type(error)(untried, hint=error.hint))
        elif len(rest) < len(group) and failures <= 3:  # later, the rest is halved even so
            waiting.append(rest)
        elif arranged is None and len(rest) <= 8:
            waiting += [[item] for item in reversed(rest)]
        else:
            # where nothing is known of them, the first is the likeliest, and makes the rest cheaper
            middle = 1 if failures == 1 and arranged is None else len(rest) // 2
            arranged = arranged or rest
            waiting += [arranged[middle:], arranged[:middle]]
    return bad


_WHOLE_UPSTREAM = (
    errors.UpstreamAuthError, errors.UpstreamNotFoundError, errors.UpstreamThrottledError,
    errors.UpstreamTimeoutError, errors.UpstreamEmptyError, errors.DiskFullError,
    errors.GitKilledError,
)  # fmt: skip
_CONNECTION = re.compile(
    r"could not resolve|failed to connect|couldn't connect|unable to connect|unable to access"
    r"|connection (refused|reset)|no route to host|network is unreachable|returned error: 5"
    r"|SSL (certificate|connect|routines)|redirects to another host",
    re.IGNORECASE,
)


def blames_objects(error: MirrordError) -> bool:
    """Whether some of the wanted objects may be the cause, so that others could come."""
    return not isinstance(error, _WHOLE_UPSTREAM) and not _CONNECTION.search(error.message)
