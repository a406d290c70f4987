"""Overlay checkouts that a disk error touched, for health.

A disk that failed a write fails every fsync in each overlay that was mounted then, until that is
reset: the kernel does not know whose data was lost. A pool tree needs no such care, because an
fsync in it tells of its own file.
"""

import time
from dataclasses import dataclass

from ..checkouts.lease import Lease, LeaseState
from ..checkouts.leases import Leases
from ..host.mounts import has_sync_error
from ..model import Backend, CheckoutId
from ..telemetry import log

_EACH_S = 1.0
_SHARE = 200  # at most half a percent of the event loop's time: 15 µs a checkout
_SHOWN = 20


@dataclass(eq=False, repr=False)
class SyncErrors:
    """Looks at all overlays when asked, at most once a second."""

    leases: Leases

    def __post_init__(self) -> None:
        self._touched: dict[CheckoutId, int] = {}  # with the number of its resets
        self._next_at = 0.0

    def problems(self) -> list[str]:
        """Return a reason why the daemon is degraded for each checkout that was touched."""
        began = time.monotonic()
        if began >= self._next_at:
            self._look()
            took_s = time.monotonic() - began
            self._next_at = began + max(_EACH_S, _SHARE * took_s)
        texts = [
            f"a disk error touched checkout {checkout}: every fsync in it fails, and what was"
            " written in it may be lost; reset it"
            for checkout in list(self._touched)[:_SHOWN]
        ]
        more = len(self._touched) - _SHOWN
        return [*texts, f"it touched {more} more checkouts"] if more > 0 else texts

    def _look(self) -> None:
        before = self._touched
        self._touched = {lease.id: lease.resets for lease in self.leases if _is_touched(lease)}
        for checkout, resets in self._touched.items():
            if before.get(checkout) != resets:
                log.warning("checkout.disk_failed", checkout=checkout)


def _is_touched(lease: Lease) -> bool:
    if lease.backend is not Backend.OVERLAY or lease.state is not LeaseState.LIVE:
        return False
    targets = ("tree", "environment") if lease.base.environment else ("tree",)
    return any(has_sync_error(lease.directory / target) for target in targets)
