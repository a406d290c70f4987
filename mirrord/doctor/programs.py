"""Checks of the programs and libraries that mirrord stands on."""

from __future__ import annotations

import importlib
import re
import shutil
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import anyio

from ..config import Settings
from ..errors import MirrordError
from ..git.command import run_git_sync
from ..git.workers import Workers
from ..host.processes import search_path
from .host import Result, judge, version

_GIT_NEEDED = (2, 36)  # core.fsync as a list of components
_GIT_TESTED = (2, 39)


def git(settings: Settings) -> Result:
    try:
        text = run_git_sync("version").stdout.decode().strip()
    except MirrordError as error:
        return "fail", error.message, "install git 2.39 or newer"
    found = version(text)
    if found < _GIT_NEEDED:
        return "fail", text, "install git 2.39 or newer: this one lacks core.fsync"
    return judge(
        found >= _GIT_TESTED, text, "mirrord is tested with git 2.39 and newer", otherwise="warn"
    )


def setpriv(settings: Settings) -> Result:
    found = shutil.which("setpriv", path=search_path())
    return judge(
        found is not None,
        found or "setpriv is not installed",
        "install util-linux: it ends git with the daemon",
    )


def packages(settings: Settings) -> Result:
    missing = [name for name in _required() if not _is_installed(name)]
    return judge(
        not missing,
        f"missing: {', '.join(missing)}" if missing else "all installed",
        "install mirrord with its dependencies",
    )


def _required() -> list[str]:
    try:
        lines = requires("mirrord") or []
    except PackageNotFoundError:
        return []
    return [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in lines if "extra ==" not in line]


def _is_installed(name: str) -> bool:
    """By its distribution: that of the client has no module of its name."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def certificates(settings: Settings) -> Result:
    well = Path("/etc/ssl/certs").is_dir()
    fact = "/etc/ssl/certs is there" if well else "/etc/ssl/certs is missing"
    return judge(well, fact, "install ca-certificates: libgit2 does not load without the directory")


def libgit2(settings: Settings) -> Result:
    """In a worker process, as the daemon does."""
    return "ok", anyio.run(_ask_worker), ""


async def _ask_worker() -> str:
    workers = Workers(size=1)
    try:
        return await workers.run(_load_objects, timeout=timedelta(seconds=30))
    finally:
        await workers.close()


def _load_objects() -> str:
    importlib.import_module("mirrord.git.objects")
    return "loads in a worker process"
