# Generated from ../asynchronous/renewal.py by tests/support/unasync.py: edit that file, then run it.
"""Keeps the leases of a client alive while their handles are: at a third of what is left, one worker for all of them.

A handle that is released, closed with its client or dropped is renewed no longer. RefCounts handles
weakly, so that a forgotten one ends as the lease says. A renewal that fails is tried again until
the lease is over; each failure is a warning in the log `mirrord`.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ...errors import CheckoutNotFoundError, MirrordError
from ...model import utc_now
from ..twins_sync import Worker

if TYPE_CHECKING:
    from .checkout import Checkout

_LEAST_SECONDS = 0.05

log = logging.getLogger("mirrord")


class Renewal:
    """The lock is for threads, and is never held over a wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[str, Checkout] = WeakValueDictionary()
        self._due: dict[str, float] = {}
        self._worker: Worker | None = None

    def hold(self, checkout: Checkout) -> None:
        """Renew it from now on."""
        with self._lock:
            self._held[checkout.id] = checkout
            self._due[checkout.id] = _next_turn(checkout.expires_at)
            if self._worker is None or not self._worker.is_running:
                self._worker = Worker(self._work)
            else:
                self._worker.ring()

    def move(self, checkout: str, expires_at: datetime) -> None:
        """Follow a lease that has got another end."""
        with self._lock:
            if checkout in self._due:
                self._due[checkout] = _next_turn(expires_at)
                if self._worker is not None:
                    self._worker.ring()

    def drop(self, checkout: str) -> None:
        with self._lock:
            if self._due.pop(checkout, None) is not None and self._worker is not None:
                self._worker.ring()

    def stop(self) -> None:
        """Renew nothing any longer."""
        with self._lock:
            self._due.clear()
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _work(self, worker: Worker) -> None:
        while True:
            for identity, due in list(self._due.items()):
                if due <= time.monotonic():
                    self._renew(identity)
            with self._lock:
                if not self._due:
                    self._worker = None
                    return
                pause = min(self._due.values()) - time.monotonic()
            worker.wait(max(pause, 0))

    def _renew(self, identity: str) -> None:
        checkout = self._held.get(identity)
        if checkout is None:
            self.drop(identity)
            return
        try:
            checkout.renew()
        except MirrordError as error:
            if identity not in self._due:
                return  # released meanwhile
            log.warning(
                "cannot renew checkout %s, which expires at %s: %s",
                identity,
                checkout.expires_at,
                error,
            )
            if isinstance(error, CheckoutNotFoundError) or checkout.expires_at <= utc_now():
                self.drop(identity)
            self.move(identity, checkout.expires_at)


def _next_turn(expires_at: datetime) -> float:
    left = (expires_at - utc_now()).total_seconds()
    return time.monotonic() + max(left / 3, _LEAST_SECONDS)
