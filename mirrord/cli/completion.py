"""The names that the daemon knows, for shells and for mistyped words."""

from collections.abc import Callable, Iterable, Iterator

import mirrord

from ..errors import MirrordError
from .session import Session

Names = Iterable[tuple[str, str]]


def candidates(session: Session, kind: str) -> list[tuple[str, str]]:
    """Return names of a kind, each with a word about it; none without a daemon or a right."""
    try:
        return list(COMPLETED[kind](session.client))
    except MirrordError:
        return []


def _checkouts(client: mirrord.Client) -> Iterator[tuple[str, str]]:
    for lease in client.list_checkouts():
        yield lease.id, lease.instance or lease.mirror


def _targets(client: mirrord.Client) -> Iterator[tuple[str, str]]:
    yield from _checkouts(client)
    for instance in client.list_instances(None):
        yield instance.id, "instance"


COMPLETED: dict[str, Callable[[mirrord.Client], Names]] = {
    "mirror": lambda client: ((it.name, it.state) for it in client.list_mirrors()),
    "dataset": lambda client: ((it.name, it.format) for it in client.list_datasets()),
    "instance": lambda client: ((it.id, "") for it in client.list_instances(None)),
    "checkout": _checkouts,
    "checkout or instance": _targets,
    "environment": lambda client: ((it.key, it.state) for it in client.list_environments()),
    "layer": lambda client: ((it.id, it.name) for it in client.list_layers(None)),
    "operation": lambda client: ((it.id, it.kind) for it in client.list_operations()),
}
