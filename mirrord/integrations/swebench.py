"""swebench: its evaluation without docker; a container is a checkout in a sandbox.

    python -m mirrord.integrations.swebench -d DATASET -p predictions.jsonl -id RUN

Arguments are those of `python -m swebench.harness.run_evaluation`, and `--socket`, `--checkout` and
`--sandbox`, the latter two in JSON. No image is pulled: packages come from the environment of the
instance, by default `{"environment": "auto"}`. Logs and reports are where swebench writes them.
"""

import argparse
import json
import runpy
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import docker
from docker.models.containers import ExecResult
from swebench.harness import docker_utils, run_evaluation

from .. import Bind, Client, InstanceNotFoundError, Sandbox

Start = Callable[[str, ExitStack], Sandbox]


class Container:
    """The part of docker's interface that the evaluation uses."""

    def __init__(self, client: "DockerClient", name: str, start: Callable[[ExitStack], Sandbox]):
        self.client, self.name, self.id = client, name, secrets.token_hex(32)
        self._start = start
        self._held = ExitStack()
        self._sandbox: Sandbox | None = None

    def start(self) -> None:
        self._sandbox = self._start(self._held)

    def exec_run(
        self, cmd: str | Sequence[str], workdir: str | None = None, **_: object
    ) -> ExecResult:
        """Run a command, with merged streams; `user` and `detach` are ignored."""
        argv = shlex.split(cmd) if isinstance(cmd, str) else cmd
        assert self._sandbox is not None
        merged = ["bash", "-c", 'exec "$@" 2>&1', "bash", *argv]
        done = self._sandbox.exec(merged, cwd=workdir)
        return ExecResult(done.exit_code, done.stdout)

    def put_archive(self, path: str, data: bytes) -> bool:
        assert self._sandbox is not None
        # as root, tar would give files to the uids that the archive names
        unpack = ["tar", "-x", "--no-same-owner", "-C", path]
        return self._sandbox.exec(unpack, input=data).exit_code == 0

    def remove(self, **_: object) -> None:
        """End the processes and release the checkout."""
        self.client.made.pop(self.id, None)
        self._held.close()


class DockerClient:
    """Replaces the client of `docker.from_env()`; pretends to have every image."""

    def __init__(self, start: Start, instances: Sequence[str]) -> None:
        self._start = start
        # The evaluation names a container `sweb.eval.<instance in lower case>.<run>`.
        self._instances = {f"sweb.eval.{instance.lower()}.": instance for instance in instances}
        self.made: dict[str, Container] = {}
        self._commands: dict[str, tuple[str, str]] = {}
        self.images = SimpleNamespace(get=str, pull=str, list=lambda **_: [])
        self.containers = SimpleNamespace(
            create=self._create, get=_raise_not_found, list=lambda **_: [*self.made.values()]
        )
        self.api = SimpleNamespace(
            exec_create=self._exec_create,
            exec_start=self._exec_start,
            exec_inspect=lambda _: {"Pid": 0},  # the sandbox kills its processes
        )

    def _create(self, *, name: str, **_: object) -> Container:
        # the longest: with a dot in it, one id may begin with another
        prefix = max(filter(name.startswith, self._instances), key=len, default=None)
        if prefix is None:
            raise InstanceNotFoundError(f"cannot find an instance for container {name}")
        instance = self._instances[prefix]
        container = Container(self, name, lambda stack: self._start(instance, stack))
        self.made[container.id] = container
        return container

    def _exec_create(self, container: str, command: str) -> dict[str, str]:
        identity = secrets.token_hex(32)
        self._commands[identity] = (container, command)
        return {"Id": identity}

    def _exec_start(self, identity: str, stream: bool) -> Iterator[bytes]:
        container, command = self._commands.pop(identity)
        yield self.made[container].exec_run(command).output


def _raise_not_found(name: str) -> None:
    raise docker.errors.NotFound(name)


@contextmanager
def without_docker(
    socket: str | None = None,
    checkout: Mapping[str, Any] | None = None,
    sandbox: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Make `swebench.harness.run_evaluation` use sandboxes instead of docker in the block."""
    options = {"environment": "auto", "bind": Bind.PROCESS, "sandbox": True, **(checkout or {})}
    with Client(socket) as client:

        def start(instance: str, stack: ExitStack) -> Sandbox:
            held = stack.enter_context(client.checkout(instance, **options))
            return stack.enter_context(Sandbox(held, **(sandbox or {})))

        def clean_up(_client: object, container: Container | None, _logger: object) -> None:
            if container is not None:
                container.remove()

        instances = [instance.id for instance in client.list_instances()]
        stand_in = DockerClient(start, instances)
        with (
            mock.patch.object(docker, "from_env", return_value=stand_in),
            # run_evaluation has imported the function by its name, so there are two to replace
            mock.patch.object(docker_utils, "cleanup_container", clean_up),
            mock.patch.object(run_evaluation, "cleanup_container", clean_up),
        ):
            yield


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--socket")
    parser.add_argument("--checkout", type=json.loads)
    parser.add_argument("--sandbox", type=json.loads)
    settings, sys.argv[1:] = parser.parse_known_args()
    with without_docker(**vars(settings)):
        runpy.run_path(run_evaluation.__file__, run_name="__main__")


if __name__ == "__main__":
    main()
