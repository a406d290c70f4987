"""`mirrord du` and `mirrord gc`: the daemon's disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from .output import count, size, table
from .parameters import Option
from .session import Session

if TYPE_CHECKING:
    from ..protocol import Garbage, Usage

_VERBOSE_HELP = "With a line for each mirror, dataset, template, checkout and so on."


def du(
    session: Session,
    verbose: Annotated[bool, Option("--verbose", "-v", help=_VERBOSE_HELP)] = False,
) -> None:
    """Shared bytes are in other lines of the same kind, too; RECLAIMABLE is what a gc would free.

    Shows your own checkouts; an administrator sees everything.
    """
    found = session.client.usage(verbose=verbose)
    session.answer(found, _described(found))
    if found.partial:
        session.note(f"{count(found.partial, 'line')} could not be seen whole, and take more")


def _described(found: Usage) -> Iterator[str]:
    header = ("KIND", "COUNT", "USED", "SIZE", "RECLAIMABLE")
    totals = [
        (each.kind, each.count, each.used, size(each.size_bytes), size(each.reclaimable_bytes))
        for each in found.totals
    ]
    both = size(found.size_bytes), size(found.reclaimable_bytes)
    yield from table(header, [*totals, ("all", None, None, *both)])
    yield ""
    yield f"{size(found.disk_free_bytes)} of {size(found.disk_bytes)} are free"
    for total in found.totals:
        rows = [each for each in found.rows if each.kind == total.kind]
        if rows:
            yield ""
            sizes = ((each.size_bytes, each.shared_bytes, each.reclaimable_bytes) for each in rows)
            lines = [
                (each.name, *map(size, bytes_), each.checkouts, each.used_at)
                for each, bytes_ in zip(rows, sizes, strict=True)
            ]
            columns = ("SIZE", "SHARED", "RECLAIMABLE", "CHECKOUTS", "LAST USED")
            yield from table((total.kind.upper(), *columns), lines)


def gc(
    session: Session,
    dry_run: Annotated[bool, Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Drops templates, sealed stores and closure packs that no checkout needs, released trees,
    leftovers and trash. Nothing recorded, pinned or leased goes. The next checkout of what went
    takes as long as the first.
    """
    found = session.client.gc(dry_run=dry_run)
    session.answer(found, _dropped(found))


def _dropped(found: Garbage) -> Iterator[str]:
    if found.dropped:
        rows = [(each.kind, each.name, each.count, size(each.size_bytes)) for each in found.dropped]
        yield from table(("KIND", "NAME", "COUNT", "SIZE"), rows)
        yield ""
    yield f"{'would free' if found.dry_run else 'freed'} {size(found.freed_bytes)}"
