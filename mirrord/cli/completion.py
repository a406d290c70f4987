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
    "mirror": lambda client: ((mirror.name, mirror.state) for mirror in client.list_mirrors()),
    "dataset": lambda client: (
        (dataset.name, dataset.format) for dataset in client.list_datasets()
    ),
    "instance": lambda client: ((instance.id, "") for instance in client.list_instances(None)),
    "checkout": _checkouts,
    "checkout or instance": _targets,
    "environment": lambda client: (
        (environment.key, environment.state) for environment in client.list_environments()
    ),
    "layer": lambda client: ((layer.id, layer.name) for layer in client.list_layers(None)),
    "operation": lambda client: (
        (operation.id, operation.kind) for operation in client.list_operations()
    ),
}
