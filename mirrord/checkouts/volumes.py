"""Volumes: checkouts that docker and podman know by name, and mount into containers.

All that there is to know of a volume stands in its lease, written with it, so a crash leaves both
or neither. While somebody has a volume mounted, its lease is renewed (`lifecycle.py`); after the
last unmount it lives as long as the volume's ttl says, and the volume ends with it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from .. import protocol
from ..errors import CheckoutBusyError, ConflictError, InvalidRequestError, NotFoundError
from ..host.peers import Peer
from ..host.processes import boot_id
from ..model import shown
from .admission import Leasing
from .leases import Lease, Volume


class Existing(NamedTuple):
    """A held checkout, by its id, its path, or another volume of it."""

    checkout: str


class ForkOf(NamedTuple):
    checkout: str
    request: protocol.ForkCheckout


Source = protocol.StartCheckout | ForkOf | Existing


@dataclass(eq=False, repr=False)
class Volumes:
    """The volumes of a daemon. `checkout` and `fork` are those of the service."""

    leasing: Leasing
    checkout: Callable[..., Awaitable[protocol.Checkout]]
    fork: Callable[..., Awaitable[protocol.Checkout]]

    def __post_init__(self) -> None:
        self._in_creation: set[str] = set()

    def list(self) -> list[tuple[Lease, Volume]]:
        return [(lease, volume) for lease in self.leasing.leases for volume in lease.volumes]

    def find(self, name: str) -> tuple[Lease, Volume] | None:
        return next((pair for pair in self.list() if pair[1].name == name), None)

    def get(self, name: str) -> tuple[Lease, Volume]:
        if found := self.find(name):
            return found
        raise NotFoundError(
            f"cannot find volume {shown(name)}: there is no such volume",
            hint="it may have expired, or its checkout was released",
        )

    async def create(
        self, name: str, part: str, options: dict[str, str], source: Source, peer: Peer
    ) -> bool:
        """Take a checkout for a new volume, or name one that is held.

        False where there is this volume already. Raises ConflictError where it has other options.
        """
        if found := self.find(name):
            if found[1].options != options:
                fact = f"it exists with other options, for checkout {found[0].id}"
                raise ConflictError(
                    f"cannot make volume {name}: {fact}", hint="choose another name"
                )
            return False
        asked = source.request if isinstance(source, ForkOf) else source
        asked_s = None if isinstance(asked, Existing) else asked.ttl
        ttl_s = self.leasing.ttl(asked_s, peer).total_seconds()
        volume = Volume(name, part, options, not isinstance(source, Existing), ttl_s)
        if name in self._in_creation:
            fact = f"cannot make volume {name}: another request is making it"
            raise CheckoutBusyError(fact, hint="wait for it to end, then try again")
        self._in_creation.add(name)
        try:
            if isinstance(source, protocol.StartCheckout):
                _must_have(volume, source.environment)
                await self.checkout(source, peer, volumes=(volume,))
            elif isinstance(source, ForkOf):
                parent = self.leasing.get(self._id_of(source.checkout), peer)
                _must_have(volume, parent.environment)
                await self.fork(parent.id, source.request, peer, volumes=(volume,))
            else:
                async with self.leasing.held(self._id_of(source.checkout), peer) as lease:
                    _must_have(volume, lease.environment)
                    self.leasing.leases.save(replace(lease, volumes=(*lease.volumes, volume)))
            self.leasing.publish("volume.made", self.get(name)[0], volume=name)
        finally:
            self._in_creation.remove(name)
        return True

    async def mount(self, name: str, mount: str, peer: Peer) -> str:
        """Count a mount by its id, and answer the path to mount."""
        async with self._held(name, peer) as (lease, volume):
            mounts = volume.mounted_by | {mount}
            self._save(lease, replace(volume, mounts=tuple(mounts), boot=boot_id()))
            self.leasing.publish("volume.mounted", lease, volume=name, mounts=len(mounts))
            return path_of(lease, volume)

    async def unmount(self, name: str, mount: str, peer: Peer) -> None:
        """Count a mount no more; after the last one the volume's ttl begins."""
        async with self._held(name, peer) as (lease, volume):
            mounts = volume.mounted_by - {mount}
            if not mounts:
                expires_at = self.leasing.clock() + timedelta(seconds=volume.ttl_s)
                lease = replace(lease, expires_at=max(lease.expires_at, expires_at))
            self._save(lease, replace(volume, mounts=tuple(mounts)))
            self.leasing.publish("volume.unmounted", lease, volume=name, mounts=len(mounts))

    async def remove(self, name: str, peer: Peer) -> None:
        """Forget a volume, and release its checkout unless another volume or somebody else has it.

        Whether one is in use is for the container engine to know: a mount that it forgot in a crash
        keeps nothing.
        """
        async with self._held(name, peer) as (lease, volume):
            rest = tuple(each for each in lease.volumes if each.name != name)
            if volume.holds and not rest:
                self.leasing.lifecycle.end(lease)
            else:
                if volume.holds:
                    rest = (replace(rest[0], holds=True), *rest[1:])
                self.leasing.leases.save(replace(lease, volumes=rest))
        self.leasing.publish("volume.removed", lease, volume=name)
        await self.leasing.trash.keep_up()

    @asynccontextmanager
    async def _held(self, name: str, peer: Peer) -> AsyncIterator[tuple[Lease, Volume]]:
        async with self.leasing.held(self.get(name)[0].id, peer):
            yield self.get(name)

    def _id_of(self, checkout: str) -> str:
        found = self.find(checkout)
        return found[0].id if found else checkout

    def _save(self, lease: Lease, volume: Volume) -> None:
        volumes = tuple(volume if each.name == volume.name else each for each in lease.volumes)
        self.leasing.leases.save(replace(lease, volumes=volumes))


def path_of(lease: Lease, volume: Volume) -> str:
    return (
        f"{lease.directory}" if volume.part == "directory" else f"{lease.directory}/{volume.part}"
    )


def _must_have(volume: Volume, environment: object) -> None:
    if volume.part == "environment" and environment is None:
        fact = f"cannot make volume {volume.name}: its checkout has no environment"
        raise InvalidRequestError(fact, hint="name one, or auto, as environment= of the checkout")
