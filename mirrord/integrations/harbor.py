"""Harbor: an environment whose task is an instance.

    harbor run -p TASKS -a AGENT --environment-kwarg 'checkout={"environment": "auto"}' \
        --environment-import-path mirrord.integrations.harbor:MirrordEnvironment

The name of the task is the id of the instance. A task's Dockerfile is not built: the tree is the
checkout at /testbed and at the task's workdir, and packages are those of its environment.
"""

import io
import tarfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.tar_transfer import pack_dir_to_bytes
from harbor.models.task.config import NetworkMode

from .. import AsyncSandbox
from . import open_sandbox


class MirrordEnvironment(BaseEnvironment):
    """A checkout with a sandbox, from `start` to `stop`."""

    def __init__(
        self,
        *arguments: Any,
        instance: str | None = None,
        socket: str | None = None,
        checkout: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._instance = instance or self.environment_name.rpartition("/")[2]
        self._socket, self._checkout, self._limits = socket, checkout, sandbox or {}
        self._held = AsyncExitStack()
        self._sandbox: AsyncSandbox | None = None

    @staticmethod
    def type() -> str:
        return "mirrord"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Accept any definition: that of the task is not used."""

    async def start(self, force_build: bool) -> None:
        """Check out the instance, and make Harbor's directories."""
        limits: dict[str, Any] = {
            "network": self._network_policy.network_mode != NetworkMode.NO_NETWORK
        }
        if self.task_env_config.memory_mb:
            limits["memory_bytes"] = self.task_env_config.memory_mb * 1024**2
        if self.task_env_config.workdir:
            limits["workdir"] = self.task_env_config.workdir
        opening = open_sandbox(
            self._instance,
            socket=self._socket,
            checkout=self._checkout,
            sandbox={**limits, **self._limits},
        )
        self._sandbox = await self._held.enter_async_context(opening)
        await self.ensure_dirs(self._mount_targets())

    async def stop(self, delete: bool) -> None:
        """End the processes and release the checkout, whatever `delete` says."""
        await self._held.aclose()

    @property
    def sandbox(self) -> AsyncSandbox:
        if self._sandbox is None:
            raise RuntimeError(f"the environment of {self._instance} has not started")
        return self._sandbox

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command as the checkout's owner; `user` is ignored."""
        done = await self.sandbox.exec(
            command, cwd=cwd, variables=self._merge_env(env), timeout=timeout_sec
        )
        out, error = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        if done.struck:
            error += f"\nthe command met its limit of {done.struck}"
        return ExecResult(stdout=out, stderr=error, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.sandbox.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = pack_dir_to_bytes(source_dir).read()
        await self._must("mkdir", "-p", target_dir)
        # as root, tar would give files to the uids that they have on the host
        await self._must("tar", "-x", "--no-same-owner", "-C", target_dir, input=packed)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self.sandbox.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._must("tar", "-c", "-C", source_dir, ".")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            # the filter refuses members that lead out of the directory
            archive.extractall(target_dir, filter=transfer_tar_filter)  # noqa: S202

    async def _must(self, *command: str, input: bytes | None = None) -> bytes:  # noqa: A002
        done = await self.sandbox.exec(command, input=input)
        if done.exit_code:
            raise RuntimeError(f"{command[0]} failed: {done.stderr.decode(errors='replace')}")
        return done.stdout
