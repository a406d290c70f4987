"""Starts the fork server that workers come from (`nursery.py`). Imports next to nothing: this can be the first thing done."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import forkserver

_loaded = ["mirrord.git.nursery", "mirrord.git.workers"]


def prepare_workers(preload: Sequence[str] = ()) -> None:
    """Have the fork server there, so that nobody waits for what it loads: `preload` too. Once for all pools of a process.

    Call it in the thread that lives longest: the server dies with the *thread* that started it. It keeps the umask and the limits
    of this moment.
    """
    _loaded.extend(preload)
    forkserver.set_forkserver_preload(_loaded)
    forkserver.ensure_running()
