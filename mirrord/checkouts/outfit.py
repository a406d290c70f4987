"""What a checkout has beside its commit: a prepared layer, and an environment.

Owns which of them a request means, and that both are there until a lease holds them.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from ..catalog import InstanceRow
from ..errors import AccessError, EnvironmentNotFoundError
from ..host.peers import Access, Peer
from ..model import History
from ..protocol import ResetCheckout, StartCheckout
from .environments import EnvironmentStore
from .leases import EnvironmentName, Lease, SavedLayer
from .prepared import PreparedLayers
from .resolve import ResolvedRequest, Resolver


class Outfit(NamedTuple):
    """Members of a lease."""

    saved: SavedLayer | None = None
    environment: EnvironmentName | None = None


class Outfits:
    """Belongs to the event loop. `environment_of` names what an instance's code runs in."""

    def __init__(
        self,
        prepared: PreparedLayers,
        environments: EnvironmentStore,
        resolver: Resolver,
        access: Access,
        environment_of: Callable[[InstanceRow], str | None],
    ) -> None:
        self._prepared = prepared
        self._environments = environments
        self._resolver = resolver
        self._access = access
        self._environment_of = environment_of

    @asynccontextmanager
    async def chosen(
        self,
        request: StartCheckout | ResetCheckout,
        found: ResolvedRequest,
        history: History,
        peer: Peer,
        lease: Lease | None = None,
    ) -> AsyncIterator[Outfit]:
        """What a request asks for. A `lease` keeps what it has: the environment unless another is
        named, the layer unless one is named, or the commit or the environment is another one.
        """
        environment, saved = (lease.environment, lease.saved) if lease else (None, None)
        if request.environment is not None:
            environment = await self._find_environment(request.environment, found)
        is_same = lease and (lease.commit, lease.environment) == (found.commit, environment)
        if request.layer or not is_same:
            place = found.mirror.key, found.commit, history
            saved = self._prepared.choose(request.layer, place, peer.uid, environment)
        with ExitStack() as stack:
            if environment is not None:
                self._environments.hold(environment.digest)
                stack.callback(self._environments.drop, environment.digest)
            stack.enter_context(self._prepared.held(saved))
            yield Outfit(saved, environment)

    async def _find_environment(self, name: str, found: ResolvedRequest) -> EnvironmentName:
        if name == "auto":
            row = await self._resolver.find_row(found)
            asked = self._environment_of(row) if row else None
            if asked is None:
                fact = "it is of no instance"
                if row is not None:
                    fact = f"no recipe of instance {row.public_id} is known"
                raise EnvironmentNotFoundError(
                    f"cannot find the environment of the checkout: {fact}",
                    hint="name one by its key; see `mirrord environment list`",
                )
            name = asked
        ready = self._environments.get(name)
        return EnvironmentName(ready.key, ready.digest)

    def must_be_trusted(self, graded: Lease) -> None:
        """Refuse the grade of a checkout whose owner saved its layer: that is no change of theirs,
        and could be anything. Administrators may grade what they did themselves.
        """
        saved, owner = graded.saved, graded.owner_uid
        if saved is not None and saved.saved_by == owner and not self._access.is_admin(owner):
            raise AccessError(
                f"cannot grade checkout {graded.id}: its owner, uid {owner}, saved its layer"
                f" {saved.name}",
                hint="let an administrator save it, or the one who takes the checkouts; or grade"
                " the patch of `mirrord diff` without it",
            )
