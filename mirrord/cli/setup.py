"""`service install` and `service uninstall`: mirrord as a service of this host's systemd."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from .. import installer
from ..doctor.checks import Step
from .session import Option, Session, print_line

DryRun = Annotated[bool, Option("Print what it would do, and change nothing.")]


def install(session: Session, *, dry_run: DryRun = False) -> None:
    """Writes units, users, directories and a configuration where there is none, and starts them.

    The units start the environment that this mirrord is installed in. Done again after an upgrade
    of it, it writes the units of the new version and restarts the services.
    """
    if not dry_run:
        installer.refuse_host()
    _do(session, installer.plan_install(Path(sys.prefix)), dry_run=dry_run)


def uninstall(session: Session, *, dry_run: DryRun = False) -> None:
    """Keeps the configuration, the state directory and the environment, and says where they are."""
    if not dry_run:
        installer.refuse_host()
    _do(session, installer.plan_uninstall(Path(sys.prefix)), dry_run=dry_run)
    kept = [str(path) for path in (installer.CONFIG, installer.STATE) if path.exists()]
    if kept:
        session.note(f"kept: {', '.join(kept)}")


def _do(session: Session, steps: list[Step], *, dry_run: bool) -> None:
    for step in steps:
        if not session.json:
            print_line(step.what)
        if not dry_run:
            step.act()
    if session.json:
        session.print_json({"steps": [step.what for step in steps]})
