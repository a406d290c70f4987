"""inspect-ai: the sandbox `mirrord`, an entry point.

    Task(dataset, sandbox="mirrord")                       # or ("mirrord", "sandbox.json")

The instance is `instance_id` in a sample's metadata. A configuration file is JSON with `socket`,
`checkout` and `sandbox`.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from .. import AsyncSandbox, PathNotFoundError
from . import open_sandbox


class MirrordSandboxConfig(BaseModel, frozen=True):
    """The settings that all adapters have."""

    socket: str | None = None
    checkout: dict[str, Any] = {}
    sandbox: dict[str, Any] = {}


@sandboxenv(name="mirrord")
class MirrordSandboxEnvironment(SandboxEnvironment):
    """A sandbox over a checkout for each sample."""

    def __init__(self, held: AsyncExitStack, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self.held, self.sandbox = held, sandbox

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return MirrordSandboxConfig(**config)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Check out the sample's instance."""
        if isinstance(config, str):
            config = MirrordSandboxConfig(**json.loads(Path(config).read_text(encoding="utf-8")))
        settings = config.model_dump() if config else {}
        held = AsyncExitStack()
        opening = open_sandbox(metadata["instance_id"], **settings)
        return {"default": cls(held, await held.enter_async_context(opening))}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls).held.aclose()

    async def exec(
        self,
        cmd: list[str],
        # as inspect-ai names it
        input: str | bytes | None = None,  # noqa: A002
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command as the checkout's owner; raises TimeoutError, as inspect-ai expects."""
        if user is not None:
            raise SandboxUserUnsupportedError(f"cannot run as {user!r}: a sandbox has one user")
        done = await self.sandbox.exec(
            cmd,
            input=input.encode() if isinstance(input, str) else input,
            cwd=cwd,
            variables=env,
            timeout=timeout,
        )
        if done.struck == "time":
            raise TimeoutError(f"{cmd[0]} ran for more than {timeout} s")
        code, error = done.exit_code, done.stderr.decode(errors="replace")
        # 126 of a shell: found, but not executable; inspect-ai expects the error of the host
        if code == 126 and b"ermission denied" in done.stderr:
            raise PermissionError(errno.EACCES, error, cmd[0])
        out = done.stdout.decode(errors="replace")
        return ExecResult(success=code == 0, returncode=code, stdout=out, stderr=error)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with _as_os_error(file):
            await self.sandbox.write(file, data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        try:
            with _as_os_error(file):
                data = await self.sandbox.read(file)
        except PermissionError as error:
            # Landlock says so of a directory, too, such as /etc
            if (await self.exec(["test", "-d", file])).success:
                number = errno.EISDIR
                raise OSError(number, os.strerror(number).lower(), file) from error
            raise
        if len(data) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data


@contextmanager
def _as_os_error(file: str) -> Iterator[None]:
    """Raise the OSError that inspect-ai expects, such as IsADirectoryError."""
    try:
        yield
    except PathNotFoundError as error:
        # the programs in the sandbox print strerror(3)
        for number in (errno.EACCES, errno.EISDIR, errno.ENOENT):
            if os.strerror(number) in error.message:
                raise OSError(number, os.strerror(number).lower(), file) from error
        raise
