"""Volumes: names under which docker and podman mount checkouts into containers.

A volume is stored in its lease, so a crash leaves both or neither. While it is mounted, the lease
is renewed (`lifecycle.py`); after the last unmount the lease lives for the volume's ttl, and the
volume ends with it.
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
from .lease import Lease, Volume
from .requests.admission import Leasing


class Existing(NamedTuple):
    """An existing checkout, by its id, its path, or another volume of it."""

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
        if pair := self.find(name):
            return pair
        raise NotFoundError(
            f"cannot find volume {shown(name)}: it does not exist",
            hint="it may have expired, or its checkout was released",
        )

    async def create(
        self, name: str, part: str, options: dict[str, str], source: Source, peer: Peer
    ) -> bool:
        """Make a checkout for a new volume, or add the volume to an existing checkout.

        Returns False if the volume exists. Raises ConflictError if it has other options.
        """
        if existing := self.find(name):
            if existing[1].options == options:
                return False
            fact = f"it exists with other options, for checkout {existing[0].id}"
            raise ConflictError(f"cannot make volume {name}: {fact}", hint="choose another name")
        asked = source.request if isinstance(source, ForkOf) else source
        asked_s = None if isinstance(asked, Existing) else asked.ttl
        ttl_s = self.leasing.ttl(asked_s, peer).total_seconds()
        volume = Volume(name, part, options, not isinstance(source, Existing), ttl_s)
        if name in self._in_creation:
            fact = f"cannot make volume {name}: another request is making it"
            raise CheckoutBusyError(fact, hint="wait for it to end, then try again")
        # no lease has the name before the checkout is made, and so no lock keeps a second one out
        self._in_creation.add(name)
        try:
            if isinstance(source, protocol.StartCheckout):
                _must_have_part(volume, source.environment)
                await self.checkout(source, peer, volumes=(volume,))
            elif isinstance(source, ForkOf):
                parent = self.leasing.get(self._id_of(source.checkout), peer)
                _must_have_part(volume, parent.base.environment)
                await self.fork(parent.id, source.request, peer, volumes=(volume,))
            else:
                async with self.leasing.held(self._id_of(source.checkout), peer) as lease:
                    _must_have_part(volume, lease.base.environment)
                    _must_have_objects(lease)
                    self.leasing.leases.save(replace(lease, volumes=(*lease.volumes, volume)))
            self.leasing.publish("volume.made", self.get(name)[0], volume=name)
        finally:
            self._in_creation.remove(name)
        return True

    async def mount(self, name: str, mount: str, peer: Peer) -> str:
        """Record a mount by its id; return the path to mount."""
        async with self._held(name, peer) as (lease, volume):
            mounts = volume.mounted_by | {mount}
            self._save(lease, replace(volume, mounts=tuple(mounts), boot=boot_id()))
            self.leasing.publish("volume.mounted", lease, volume=name, mounts=len(mounts))
            return path_of(lease, volume)

    async def unmount(self, name: str, mount: str, peer: Peer) -> None:
        """Remove a mount's record; after the last one the volume's ttl begins."""
        async with self._held(name, peer) as (lease, volume):
            mounts = volume.mounted_by - {mount}
            if not mounts:
                expires_at = self.leasing.clock() + timedelta(seconds=volume.ttl_s)
                # its owner may have renewed it for longer
                lease = lease.until(max(lease.terms.expires_at, expires_at))
            self._save(lease, replace(volume, mounts=tuple(mounts)))
            self.leasing.publish("volume.unmounted", lease, volume=name, mounts=len(mounts))

    async def remove(self, name: str, peer: Peer) -> None:
        """Remove a volume. Release its checkout if that was made for a volume and this is the last.

        The container engine decides whether a volume is in use: recorded mounts, which an engine
        may lose in a crash, do not prevent this.
        """
        async with self._held(name, peer) as (lease, volume):
            others = tuple(other for other in lease.volumes if other.name != name)
            if volume.holds and not others:
                self.leasing.lifecycle.end(lease)
            else:
                if volume.holds:
                    # the checkout was made for a volume, and ends with the last of its volumes
                    others = (replace(others[0], holds=True), *others[1:])
                self.leasing.leases.save(replace(lease, volumes=others))
        self.leasing.publish("volume.removed", lease, volume=name)
        await self.leasing.trash.keep_up()

    @asynccontextmanager
    async def _held(self, name: str, peer: Peer) -> AsyncIterator[tuple[Lease, Volume]]:
        async with self.leasing.held(self.get(name)[0].id, peer):
            # again, as it is under the lock
            yield self.get(name)

    def _id_of(self, checkout: str) -> str:
        pair = self.find(checkout)
        return pair[0].id if pair else checkout

    def _save(self, lease: Lease, volume: Volume) -> None:
        volumes = tuple(volume if other.name == volume.name else other for other in lease.volumes)
        self.leasing.leases.save(replace(lease, volumes=volumes))


def path_of(lease: Lease, volume: Volume) -> str:
    directory = str(lease.directory)
    return directory if volume.part == "directory" else f"{directory}/{volume.part}"


def _must_have_objects(lease: Lease) -> None:
    if lease.borrows:
        raise InvalidRequestError(
            f"cannot mount checkout {lease.id}: its .git borrows objects that no container sees",
            hint='set checkouts.objects = "private", and make another checkout',
        )


def _must_have_part(volume: Volume, environment: object) -> None:
    if volume.part == "environment" and environment is None:
        fact = f"cannot make volume {volume.name}: its checkout has no environment"
        raise InvalidRequestError(fact, hint="give the option environment=KEY or environment=auto")
