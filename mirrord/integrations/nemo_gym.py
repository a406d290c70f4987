"""NeMo Gym: the sandbox provider `mirrord`, an entry point.

    AsyncSandbox({"mirrord": {"checkout": {"environment": "auto"}}})

The instance is `instance_id` in the spec's metadata, else its `image` without registry and tag.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from .. import AsyncSandbox, CheckoutNotFoundError, MirrordError
from . import open_sandbox

Held = tuple[AsyncExitStack, AsyncSandbox]  # `raw` of a handle


class MirrordProvider:
    """A sandbox over a checkout for each `create`."""

    name = "mirrord"

    def __init__(
        self,
        socket: str | None = None,
        checkout: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        self._socket, self._checkout, self._sandbox = socket, checkout or {}, sandbox or {}

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Check out the instance; the sandbox has the memory limit of the spec."""
        limits: dict[str, Any] = {"variables": spec.env} if spec.env else {}
        if spec.resources.memory_mib:
            limits["memory_bytes"] = spec.resources.memory_mib * 1024**2
        opening = open_sandbox(
            spec.metadata.get("instance_id") or _instance(spec.image),
            socket=self._socket,
            checkout={"ttl": spec.ttl_s, **self._checkout},
            sandbox={**limits, **self._sandbox},
        )
        held = AsyncExitStack()
        try:
            box = await held.enter_async_context(opening)
        except MirrordError as error:
            raise SandboxCreateError(str(error)) from error
        return SandboxHandle(box.checkout.id, self.name, (held, box))

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command as the checkout's owner; `user` is ignored."""
        done = await _box(handle).exec(command, cwd=cwd, variables=env, timeout=timeout_s)
        return SandboxExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.exit_code,
            error_type="timeout" if done.struck == "time" else None,
        )

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await _box(handle).upload(source_path, target_path)

    async def download_file(
        self, handle: SandboxHandle, source_path: str, target_path: Path
    ) -> None:
        await _box(handle).download(source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            await _box(handle).checkout.renew()
        except CheckoutNotFoundError:
            return SandboxStatus.STOPPED
        return SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        """End the processes and release the checkout."""
        held: Held = handle.raw
        await held[0].aclose()

    async def aclose(self) -> None:
        """Do nothing: each handle has its own client."""


def _box(handle: SandboxHandle) -> AsyncSandbox:
    held: Held = handle.raw
    return held[1]


def _instance(image: str | None) -> str:
    return (image or "").rpartition("/")[2].partition(":")[0]
