"""mini-swe-agent: its commands run in a sandbox over a checkout.

Its batch runner passes the instance to an environment only through `run.env_startup_command`, a
command that is rendered with the row. So without an instance, the first command is the id of one:

    mini-extra swebench -c swebench.yaml -c run.env_startup_command='{{instance_id}}' \\
        --environment-class mirrord.integrations.mini_swe_agent.MirrordEnvironment
"""

from contextlib import ExitStack
from typing import Any

from minisweagent.environments.local import LocalEnvironment
from pydantic import BaseModel

from .. import Bind, Client, MirrordError, Sandbox


class MirrordEnvironmentConfig(BaseModel):
    """`environment` of a configuration; `timeout` is in seconds, `env` is for each command.

    Commands start in `cwd`, by default where the sandbox shows the tree.
    """

    instance: str = ""
    socket: str | None = None
    checkout: dict[str, Any] = {}
    sandbox: dict[str, Any] = {}
    cwd: str = ""
    env: dict[str, str] = {}
    # as in mini-swe-agent's own LocalEnvironment
    timeout: int = 30


class MirrordEnvironment(LocalEnvironment):
    """A checkout with a sandbox, from the id of the instance to `cleanup`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(config_class=MirrordEnvironmentConfig, **settings)
        self._held = ExitStack()
        self.sandbox: Sandbox | None = None
        if self.config.instance:
            self._open(self.config.instance)

    def _open(self, instance: str) -> None:
        checkout = {"bind": Bind.PROCESS, "sandbox": True, **self.config.checkout}
        with ExitStack() as stack:
            client = stack.enter_context(Client(self.config.socket))
            held = stack.enter_context(client.checkout(instance, **checkout))
            self.sandbox = stack.enter_context(Sandbox(held, **self.config.sandbox))
            self._held = stack.pop_all()
        self.config.instance = instance
        self.config.cwd = self.config.cwd or self.sandbox.workdir

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run a command; its output includes standard error."""
        command = action.get("command", "")
        if self.sandbox is None:
            self._open(command.strip())
            return {"output": "", "returncode": 0, "exception_info": ""}
        seconds = timeout or self.config.timeout
        try:
            done = self.sandbox.exec(
                ["bash", "-c", f"exec 2>&1\n{command}"],
                timeout=seconds,
                cwd=cwd or self.config.cwd,
                variables=self.config.env,
            )
        except MirrordError as error:
            return {"output": "", "returncode": -1, "exception_info": str(error)}
        output = {
            "output": done.stdout.decode(errors="replace"),
            "returncode": -1 if done.struck else done.exit_code,
            "exception_info": f"the command met its limit of {done.struck}" if done.struck else "",
        }
        self._check_finished(output)
        return output

    def diff(self) -> bytes:
        """Return the patch of all changes, whatever the agent submits."""
        assert self.sandbox is not None
        return self.sandbox.checkout.diff()

    def cleanup(self) -> None:
        """End the sandbox and release the checkout."""
        self.sandbox = None
        self._held.close()

    def __del__(self) -> None:
        self.cleanup()
