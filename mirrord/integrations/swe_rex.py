"""swe-rex: a deployment whose runtime is a checkout in a sandbox; SWE-agent's `SWEEnv` takes it.

    SWEEnv(deployment=MirrordDeployment("psf__requests-2317"), repo=None, post_startup_commands=[])

A session is a shell in the sandbox. It has no terminal: interactive commands fail.
"""

import secrets
import shlex
from contextlib import AsyncExitStack
from typing import Any

from swerex import exceptions
from swerex.deployment.local import LocalDeployment
from swerex.runtime import abstract as rex
from swerex.runtime.local import LocalRuntime, Session

from .. import AsyncSandbox
from . import open_sandbox

# Without namespaces there is no /run to write to, and TMPDIR is private.
_ARGUMENTS = 'set -- "${TMPDIR:-/run}/$1" "${@:2}"\n'
# The shell reads lines from a pipe that never ends, and evaluates the file `command`.
# setsid: `close` kills the group of the shell, and with it what it started.
# A background shell and its children ignore SIGINT unless `env` restores the default.
_OPEN = """\
mkdir -p "$1" && cd "$1" && mkfifo lines printed && cd "$MIRRORD_WORKDIR" || exit
setsid env --default-signal=INT,QUIT bash --norc <>"$1/lines" 1<>"$1/printed" 2>&1 &
echo $! >"$1/pid"
"""
# sed -u reads no further than the mark: what follows in the pipe is the next command's
_RUN = """\
kill -0 "$(<"$1/pid")" || exit
cat >"$1/command"
echo 'eval "$(<'"$1"'/command)" </dev/null; printf "\\n'"$2"'%s\\n" $?' >"$1/lines"
exec sed -u "/^$2/q" <"$1/printed"
"""
# the kernel lists children by the thread that started them (proc(5))
_INTERRUPT = """\
set -- $(cat "/proc/$(<"$1/pid")/task/"*/children)
kill -INT $@ && sleep 0.5 && kill -KILL $@ 2>/dev/null
"""


class SandboxSession(Session):
    """A shell in a sandbox; a directory there has its pipes and its pid."""

    def __init__(self, box: AsyncSandbox, request: rex.CreateBashSessionRequest) -> None:
        self._box, self._request = box, request
        self._directory = f"swe-rex/{secrets.token_hex(8)}"

    async def start(self) -> rex.CreateBashSessionResponse:
        await self._bash(_OPEN)
        source = "; ".join(f"source {path}" for path in self._request.startup_source)
        started = await self._evaluate(source, self._request.startup_timeout)
        return rex.CreateBashSessionResponse(output=started[0])

    async def run(self, action: rex.BashAction | rex.BashInterruptAction) -> rex.BashObservation:
        """Run a command; raises CommandTimeoutError while it is still running: interrupt it."""
        if isinstance(action, rex.BashInterruptAction):
            await self._bash(_INTERRUPT)
            return rex.BashObservation(output=(await self._evaluate("", action.timeout + 5))[0])
        if action.is_interactive_command or action.is_interactive_quit:
            raise NotImplementedError("a session in a sandbox has no terminal")
        output, code = await self._evaluate(action.command, action.timeout)
        if action.check == "raise" and code:
            raise exceptions.NonZeroExitCodeError(f"{action.command!r} ended with {code}: {output}")
        return rex.BashObservation(output=output, exit_code=code)

    async def close(self) -> rex.CloseBashSessionResponse:
        await self._bash('kill -KILL -- -"$(<"$1/pid")"')
        return rex.CloseBashSessionResponse()

    async def _evaluate(self, command: str, timeout: float | None) -> tuple[str, int]:
        mark = secrets.token_hex(16)
        printed, has_timed_out = await self._bash(_RUN, mark, command=command, timeout=timeout)
        if has_timed_out:
            raise exceptions.CommandTimeoutError(f"{command!r} ran for more than {timeout} s")
        output, separator, code = printed.rpartition(f"\n{mark}")
        if not separator:
            raise exceptions.NoExitCodeError(f"the shell of the session ended: {printed}")
        return output, int(code)

    async def _bash(
        self, script: str, *words: str, command: str = "", timeout: float | None = None
    ) -> tuple[str, bool]:
        """Run a script on the directory; returns its output, and whether it timed out."""
        argv = ["bash", "-c", f"{_ARGUMENTS}{script}", "bash", self._directory, *words]
        done = await self._box.exec(argv, input=command.encode(), timeout=timeout)
        return _text(done.stdout), done.struck == "time"


class MirrordRuntime(LocalRuntime):
    """Sessions, commands and files of a sandbox, which the deployment closes."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self._box = sandbox

    async def create_session(self, request: rex.CreateSessionRequest) -> rex.CreateSessionResponse:
        if request.session in self.sessions:
            raise exceptions.SessionExistsError(f"session {request.session!r} already exists")
        self.sessions[request.session] = session = SandboxSession(self._box, request)
        return await session.start()

    async def execute(self, command: rex.Command) -> rex.CommandResponse:
        """Run a command outside of sessions."""
        line, limit = command.command, command.timeout
        argv = ["sh", "-c", line] if command.shell or isinstance(line, str) else line
        script = f"{shlex.join(argv)}{' 2>&1' if command.merge_output_streams else ''}"
        done = await self._box.exec(script, timeout=limit, cwd=command.cwd, variables=command.env)
        if done.struck == "time":
            raise exceptions.CommandTimeoutError(f"{line!r} ran for more than {limit} s")
        out, error, code = _text(done.stdout), _text(done.stderr), done.exit_code
        if command.check and code:
            raise exceptions.NonZeroExitCodeError(f"{line!r} ended with {code}: {out}{error}")
        return rex.CommandResponse(stdout=out, stderr=error, exit_code=code)

    async def read_file(self, request: rex.ReadFileRequest) -> rex.ReadFileResponse:
        data = await self._box.read(request.path)
        text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return rex.ReadFileResponse(content=text)

    async def write_file(self, request: rex.WriteFileRequest) -> rex.WriteFileResponse:
        await self._box.write(request.path, request.content.encode())
        return rex.WriteFileResponse()

    async def upload(self, request: rex.UploadRequest) -> rex.UploadResponse:
        await self._box.upload(request.source_path, request.target_path)
        return rex.UploadResponse()


class MirrordDeployment(LocalDeployment):
    """A checkout with a sandbox, from `start` to `stop`."""

    def __init__(self, instance: str, **settings: Any) -> None:
        super().__init__()
        self._instance, self._settings = instance, settings
        self._held = AsyncExitStack()
        self._runtime: MirrordRuntime | None = None

    async def start(self) -> None:
        self._hooks.on_custom_step("Checking out")
        opening = open_sandbox(self._instance, **self._settings)
        self._runtime = MirrordRuntime(await self._held.enter_async_context(opening))

    async def stop(self) -> None:
        self._runtime = None
        await self._held.aclose()


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
