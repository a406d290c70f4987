"""verifiers (v1): a runtime whose box is a checkout in a sandbox.

    async with open_runtime("psf__requests-2317") as runtime:
        trace = await agent.run(task, runtime=runtime)

verifiers reads traces by the types of its own runtimes. So this one describes itself as a docker
container, with the instance as its image and the id of the checkout as its id. A harness that runs
its program inside needs `sandbox={"network": True}` to reach the model through verifiers.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import DockerConfig, DockerRuntimeInfo, ProgramResult, Runtime, register

from .. import AsyncSandbox, MirrordError
from . import open_sandbox


class MirrordRuntime(Runtime):
    """A checkout in a sandbox, whose workdir commands start in; settings are all adapters'."""

    def __init__(self, instance: str, name: str | None = None, **settings: Any) -> None:
        super().__init__(name)
        self.config = DockerConfig(image=instance)
        self.info = DockerRuntimeInfo(image=instance)
        self._settings = settings
        self._held = AsyncExitStack()
        self._sandbox: AsyncSandbox | None = None

    @property
    def sandbox(self) -> AsyncSandbox:
        if self._sandbox is None:
            raise SandboxError(f"runtime {self.name!r} has not started")
        return self._sandbox

    async def start(self) -> None:
        opening = open_sandbox(self.config.image, **self._settings)
        self._sandbox = await self._held.enter_async_context(opening)
        self.info.id = self._sandbox.checkout.id

    async def teardown(self) -> None:
        """End the processes and release the checkout."""
        await self._held.aclose()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        done = await self.sandbox.exec(argv, variables=self.process_env(env))
        out, error = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return ProgramResult(exit_code=done.exit_code, stdout=out, stderr=error)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None:
            # verifiers reads by a command that names the path, which differs without namespaces
            there = await self.sandbox.at(path)
            return await super()._read(there, max_bytes)  # type: ignore[no-any-return]
        try:
            return await self.sandbox.read(path)
        except MirrordError as error:
            raise SandboxError(f"read {path!r}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        await self.sandbox.write(path, data)


@asynccontextmanager
async def open_runtime(
    instance: str, *, env: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[MirrordRuntime]:
    """Yield a started runtime, and stop it at the end; `env` is for each of its processes."""
    runtime = MirrordRuntime(instance, **settings)
    register(runtime)
    runtime.env = dict(env or {})
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()
