"""`du`, `gc`."""

from collections.abc import Iterator
from typing import Annotated

from ..protocol import Garbage, Usage
from .output import count, listing, size, table
from .session import Option, Session

_VERBOSE_HELP = "Show a line for each mirror, dataset, template, checkout and so on."


def du(
    session: Session,
    verbose: Annotated[bool, Option(_VERBOSE_HELP, flags="--verbose -v")] = False,
) -> None:
    """SHARED bytes are also in other lines of the same kind; RECLAIMABLE is what gc would free.
    Users see their own checkouts, administrators everything.
    """
    found = session.client.usage(verbose=verbose)
    session.answer(found, _usage_lines(found))
    if found.partial:
        session.note(
            f"{count(found.partial, 'line')} could not be read completely, and may be larger"
        )


def _usage_lines(found: Usage) -> Iterator[str]:
    header = ("KIND", "COUNT", "USED", "SIZE", "RECLAIMABLE")
    totals = [
        (each.kind, each.count, each.used, size(each.size_bytes), size(each.reclaimable_bytes))
        for each in found.totals
    ]
    both = size(found.size_bytes), size(found.reclaimable_bytes)
    yield from table(header, [*totals, ("all", None, None, *both)])
    yield ""
    yield f"{size(found.disk_free_bytes)} of {size(found.disk_bytes)} free"
    for total in found.totals:
        rows = [each for each in found.rows if each.kind == total.kind]
        if rows:
            yield ""
            columns = "SIZE=size_bytes SHARED=shared_bytes RECLAIMABLE=reclaimable_bytes CHECKOUTS"
            yield from listing(rows, f"{total.kind.upper()}=name {columns} LAST_USED=used_at")


def gc(
    session: Session,
    dry_run: Annotated[bool, Option("Print what would be removed, and remove nothing.")] = False,
) -> None:
    """These are templates, sealed stores and closure packs that no checkout needs, released trees,
    leftovers and trash, but nothing that is recorded, pinned or leased. The next checkout of a
    removed template takes as long as the first.
    """
    found = session.client.gc(dry_run=dry_run)
    session.answer(found, _gc_lines(found))


def _gc_lines(found: Garbage) -> Iterator[str]:
    if found.dropped:
        yield from listing(found.dropped, "KIND NAME COUNT SIZE=size_bytes")
        yield ""
    yield f"{'would free' if found.dry_run else 'freed'} {size(found.freed_bytes)}"
