"""From a command line to an exit status: configuration, lock, sockets, and then the service until it is told to stop.

Prints what it cannot start for on stderr and ends with the error's exit status; from then on everything goes to the log.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import uvloop

from .. import config, telemetry
from ..engine import Engine
from ..errors import MirrordError
from ..host.files import host_error
from ..host.systemd import Notifier
from .listener import open_listeners
from .lock import StateLock
from .service import Service


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon in the foreground; answers its exit status."""
    chosen = _parse(arguments)
    try:
        path = chosen.config.absolute() if chosen.config else config.find_path()
        load = partial(_load, path, chosen.socket)
        settings = load()
        telemetry.configure(settings.log.level, settings.log.format)
        return _serve(Engine(settings, config_path=path, load=load))
    except MirrordError as error:
        _explain(error)
        return error.exit_status
    except OSError as error:
        if (problem := host_error(error, "start the daemon")) is None:
            raise
        _explain(problem)
        return problem.exit_status


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mirrord.daemon", description="The mirrord daemon, in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file")
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="listen here, whatever the configuration says"
    )
    return parser.parse_args(arguments)


def _load(path: Path | None, socket: Path | None) -> config.Settings:
    settings = config.load(path)
    return settings.model_copy(update={"socket": socket.absolute()}) if socket else settings


def _serve(engine: Engine) -> int:
    notifier = Notifier.from_environment()
    engine.layout.make_root()
    with StateLock(engine.layout.root):
        listeners = open_listeners(engine.settings().socket)
        try:
            engine.layout.make()
            return uvloop.run(Service(engine, listeners, notifier).run())
        finally:
            for listener in listeners:
                listener.remove()


def _explain(error: MirrordError) -> None:
    priority = telemetry.priority("error", sys.stderr)
    told = [f"mirrord: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]
    for line in "\n".join(told).splitlines():
        print(f"{priority}{line}", file=sys.stderr)  # noqa: T201
