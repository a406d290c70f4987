"""Puts the service of checkouts together: which of its parts knows which is said only here."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from ..catalog import InstanceRow
from ..changes.pieces import CopyLimits
from ..checkouts.backend import CheckoutBackend
from ..checkouts.forks import Forks
from ..checkouts.layers import Layers, objects_path
from ..checkouts.lease import Lease
from ..checkouts.leases import Leases
from ..checkouts.lifecycle import Lifecycle
from ..checkouts.patching import Patches
from ..checkouts.pool.backend import PoolBackend
from ..checkouts.prepared import PreparedLayers
from ..checkouts.receipts import Receipts
from ..checkouts.requests.admission import Leasing
from ..checkouts.requests.quotas import Quotas
from ..checkouts.requests.resolve import CoverOf, ImagePreparer, Resolver
from ..checkouts.service import Checkouts
from ..config import CheckoutSettings, Settings
from ..datasets.service import Datasets
from ..git.command import Git
from ..host.peers import Access
from ..host.trash import Trash
from ..jobs.events import Events
from ..mirrors.service import Mirrors
from ..model import CommitId, EnvironmentName, History, MirrorName, utc_now
from ..templates.environments import EnvironmentStore
from ..templates.service import Templates
from ..workers.pool import Workers


async def _without(_: EnvironmentName, _of: MirrorName, _at: CommitId, _by: History) -> None:
    """Make no layer for an image."""


def _limits_of(bounds: CheckoutSettings) -> CopyLimits:
    return CopyLimits(bounds.copy_files, bounds.copy_bytes, bounds.copy_timeout)


def compose_checkouts(
    *,
    settings: Callable[[], Settings],
    state_dir: Path,
    git: Git,
    workers: Workers,
    mirrors: Mirrors,
    datasets: Datasets,
    templates: Templates,
    overlay: CheckoutBackend | None,
    environments: EnvironmentStore,
    access: Access,
    events: Events,
    cover_of: CoverOf,
    trash: Trash,
    clock: Callable[[], datetime] = utc_now,
    environment_of: Callable[[InstanceRow], str | None] = lambda _: None,
    prepare_image: ImagePreparer = _without,
) -> Checkouts:
    """Return the service of checkouts, not yet open.

    The pool serves every request; `overlay` is preferred where the host allows mounts.
    `environment_of` names the environment of an instance, `cover_of` what hides its leaks;
    `prepare_image` makes the layer of an image for a commit.
    """

    def limits() -> CopyLimits:
        return _limits_of(settings().checkouts)

    def objects_of(lease: Lease) -> Path:
        return objects_path(state_dir, mirrors.path(lease.mirror), lease.base)

    stores = templates.stores
    pool = PoolBackend(state_dir, workers, templates, mirrors.path, trash, environments)
    leases = Leases(state_dir)
    layers = Layers(state_dir, leases, trash)
    backends = {backend.name: backend for backend in (overlay, pool) if backend}
    lifecycle = Lifecycle(leases, layers, backends, events, trash)
    patches = Patches(
        workers, mirrors, datasets, objects_of, lambda: settings().checkouts.diff_timeout
    )
    prepared = PreparedLayers(
        leases, layers, lifecycle, environments, workers, access.is_admin, limits
    )
    quotas = Quotas(settings, access, leases, layers, prepared, workers, events)
    leasing = Leasing(
        settings, access, leases, lifecycle, quotas, events, trash, clock, patches.complete,
        has_overlay=bool(overlay),
    )  # fmt: skip
    resolver = Resolver(
        datasets, mirrors, stores.commits.learn, prepared, environments, environment_of, cover_of,
        prepare_image,
    )  # fmt: skip
    return Checkouts(
        leases=leases, layers=layers, lifecycle=lifecycle, leasing=leasing, quotas=quotas,
        resolver=resolver, forks=Forks(leases, layers, lifecycle.backend_of, limits),
        patches=patches, prepared=prepared,
        receipts=Receipts(git, workers, mirrors, stores, patches),
        pool=pool, stores=stores, mirrors=mirrors, trash=trash, clock=clock,
    )  # fmt: skip
