"""What this host can and cannot do for a daemon with these settings, and what to change.

Owns a table of checks; each asks the host one thing and answers one `Check`. Leaves all as it was, needs no daemon, and goes on
when a check itself fails: that is an answer too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..config import Settings
from ..errors import MirrordError
from . import access, catalog, kernel, programs, state
from .asking import Result, Verdict

__all__ = ["Check", "examine"]


class Check(NamedTuple):
    """What was looked at, how it is, and what to do about it where it is not well."""

    name: str
    verdict: Verdict
    fact: str
    remedy: str = ""


def examine(settings: Settings) -> list[Check]:
    """Run every check."""
    return [_guarded(name, partial(check, settings)) for name, check in _CHECKS]


def _guarded(name: str, check: Callable[[], Result]) -> Check:
    try:
        return Check(name, *check())
    except (OSError, MirrordError, ValueError) as error:
        return Check(
            name,
            "warn",
            f"could not be looked at: {error}",
            "look at it by hand, or run the doctor as root",
        )


_CHECKS: tuple[tuple[str, Callable[[Settings], Result]], ...] = (
    ("git", programs.git),
    ("setpriv", programs.setpriv),
    ("python packages", programs.packages),
    ("certificates", programs.certificates),
    ("libgit2", programs.libgit2),
    ("kernel", kernel.kernel),
    ("overlay", kernel.overlay),
    ("privileges", kernel.privileges),
    ("mount namespace", kernel.mount_namespace),
    ("mount limit", kernel.mount_limit),
    ("inotify", kernel.inotify),
    ("open files", kernel.open_files),
    ("clock", kernel.clock),
    ("state directory", state.state_dir),
    ("its parents", state.parents),
    ("its file system", state.file_system),
    ("its parts", state.one_file_system),
    ("access control lists", state.access_lists),
    ("set-id bits", state.set_id_bits),
    ("space", state.space),
    ("inodes", state.inodes),
    ("catalog", catalog.catalog),
    ("leftovers", state.leftovers),
    ("socket", access.socket_path),
    ("daemon", access.daemon),
    ("group", access.group),
    ("exec", access.confinement),
)
