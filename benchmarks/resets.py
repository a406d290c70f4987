"""Resets and moves, for each kind of owner: the pool proves an ordinary user's checkout by stat, and reads root's."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from measured_daemon import MIRROR, NOBODY, Daemon
from rivals import dirty

from mirrord import Checkout
from mirrord.model import Backend


@dataclass(frozen=True, slots=True)
class Holder:
    """A user who holds checkouts; `label` says in a table who."""

    uid: int
    label: str

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Be that user, as the daemon and the files see it."""
        before = os.geteuid(), os.getegid()
        if self.uid == before[0]:
            yield
            return
        os.setegid(self.uid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(before[0])
            os.setegid(before[1])


def holders() -> list[Holder]:
    """As root: a user who is not the daemon's, as a service has them, and root. Else the daemon's own, who is the only one."""
    if os.geteuid():
        return [Holder(os.geteuid(), ", the daemon's own user")]
    return [Holder(NOBODY, ", another user than the daemon's"), Holder(0, ", root")]


@contextmanager
def held(daemon: Daemon, commit: str, backend: Backend, owner: Holder) -> Iterator[Checkout]:
    """A checkout of the owner's; whoever resets it afterwards, its files stay the owner's."""
    with daemon.client() as client:
        with owner.acting():
            checkout = client.checkout(mirror=MIRROR, commit=commit, backend=backend)
        with checkout:
            yield checkout


def dirty_reset(checkout: Checkout, owner: Holder) -> Callable[[], float]:
    def ours() -> float:
        with owner.acting():
            dirty(checkout.path)
        return timed(checkout.reset)

    return ours


def to_and_fro(places: tuple[str, str], move: Callable[[str], object]) -> Callable[[], float]:
    """Go to the one and the other place in turn."""
    turns = itertools.cycle(places)
    return lambda: timed(lambda: move(next(turns)))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
