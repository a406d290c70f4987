"""What the daemon does before its other modules are loaded: read its options, enter its home.

A process joins a user namespace with one thread, and what it starts is in it too: so before the
fork server.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import places
from ..errors import BackendUnavailableError, MirrordError
from ..host.namespaces import home
from ..host.processes import Capability, has_capabilities

if TYPE_CHECKING:
    from ..config import Settings


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


def load_settings(options: argparse.Namespace) -> "Settings":
    """Read the configuration file; `--socket` overrides it. Raises InvalidConfigError."""
    # 0.1 s, in which the fork server of root's daemon loads already
    from .. import config  # noqa: PLC0415

    settings = config.load(config_path(options))
    named = places.named_socket(options.socket, options.config)
    return settings.model_copy(update={"socket": named}) if named else settings


def enter_home(options: argparse.Namespace) -> "Settings | None":
    """Enter the home of an ordinary user's daemon, if it may have one.

    `[service] namespace` is a wish: where it cannot be, `home.refusals` has the reason. Returns
    the settings, if they were read: the start meets a fault of the file again.
    """
    if os.geteuid() == 0 or has_capabilities(Capability.SYS_ADMIN):
        return None
    try:
        settings = load_settings(options)
    except MirrordError:
        return None
    if settings.service.namespace != "auto":
        return settings
    if others := sorted({"group", "admins"} & settings.access.model_fields_set):
        # in a user namespace every user without a mapping has one and the same number
        fact = f"the daemon is outside of a user namespace, to know the users of access.{others[0]}"
        home.refusals.append(fact)
        return settings
    layout = places.Layout(settings.state_dir)
    try:
        layout.make_root()
        home.enter(layout.root)
    except BackendUnavailableError as error:
        home.refusals.append(f"{error.message}; {error.hint}")
    except MirrordError:
        pass  # the start will meet it again
    return settings
