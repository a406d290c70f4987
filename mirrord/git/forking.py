"""Starts the fork server that workers come from (`nursery.py`). Imports next to nothing: this can be the first thing done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, util
from pathlib import Path

_loaded = ["mirrord.git.nursery", "mirrord.git.workers"]


def prepare_workers(preload: Sequence[str] = (), *, nest: Path | None = None) -> None:
    """Have the fork server there, so that nobody waits for what it loads: `preload` too. Once for all pools of a process.

    Its socket lies below `nest`, where one is given the first time. Call it in the thread that lives longest: the server dies
    with the *thread* that started it. It keeps the umask and the limits of this moment.
    """
    # multiprocessing (3.11) starts its servers with `python -c`, which looks for modules in the
    # working directory first: a json.py in a checkout would run as root. It hands on -P only where
    # this process has it, and a console script has not.
    os.environ["PYTHONSAFEPATH"] = "1"
    _loaded.extend(preload)
    forkserver.set_forkserver_preload(_loaded)
    with _temporary_files_in(nest):
        util.get_temp_dir()
    forkserver.ensure_running()


@contextmanager
def _temporary_files_in(directory: Path | None) -> Iterator[None]:
    before, tempfile.tempdir = tempfile.tempdir, str(directory) if directory else tempfile.tempdir
    try:
        yield
    finally:
        tempfile.tempdir = before
