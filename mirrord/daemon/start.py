"""What the daemon does before its other modules are loaded: read its options, enter its home.

A process joins a user namespace with one thread, and what it starts is in it too: so before the
fork server, and before the configuration is validated. Of the file only a few keys are read; its
faults are reported later.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import places
from ..errors import BackendUnavailableError, MirrordError
from ..host import home
from ..host.processes import Capability, has_capabilities


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `python -m mirrord.daemon`; exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m mirrord.daemon", description="The mirrord daemon, in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="listen here instead of at the configured path"
    )
    return parser.parse_args(arguments)


def config_path(options: argparse.Namespace) -> Path | None:
    """Return the configuration file that the options choose."""
    return options.config.absolute() if options.config else places.find_config_path()


def enter_home(options: argparse.Namespace) -> None:
    """Enter the home of an ordinary user's daemon, if it may have one.

    `[service] namespace` is a wish: where it cannot be, `home.refusals` has the reason.
    """
    if os.geteuid() == 0 or has_capabilities(Capability.SYS_ADMIN):
        return
    file = config_path(options)
    values: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        values = tomllib.loads(file.read_text(encoding="utf-8")) if file else {}
    if _read(values, "service").get("namespace", "auto") != "auto":
        return
    if others := sorted({"group", "admins"} & _read(values, "access").keys()):
        # in a user namespace every user without a mapping has one and the same number
        fact = f"the daemon is outside of a user namespace, to know the users of access.{others[0]}"
        home.refusals.append(fact)
        return
    state_dir = values.get("state_dir")
    is_given = isinstance(state_dir, str) and state_dir.startswith("/")
    layout = places.Layout(Path(str(state_dir)) if is_given else places.default_state_dir())
    try:
        layout.make_root()
        home.enter(layout.root)
    except BackendUnavailableError as error:
        home.refusals.append(f"{error.message}; {error.hint}")
    except MirrordError:
        return  # the start will meet it again


def _read(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = values.get(section)
    return found if isinstance(found, dict) else {}
