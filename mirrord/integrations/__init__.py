"""Adapters: environments, sandboxes, runtimes and containers of harnesses, implemented by
mirrord.

Each module imports its harness; docs/integrations.md has their settings. `kubernetes` is a CSI
plugin, a separate process. The others use only the public client, and hold a checkout from start to
stop. If the harness is killed, its sandboxes and checkouts end too.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from .. import AsyncClient, AsyncSandbox, Bind


@asynccontextmanager
async def open_sandbox(
    instance: str,
    *,
    socket: Path | str | None = None,
    checkout: Mapping[str, Any] | None = None,
    sandbox: Mapping[str, Any] | None = None,
) -> AsyncIterator[AsyncSandbox]:
    """Yield a sandbox over a new checkout of an instance, and release it at the end."""
    # bound to the harness's process: a killed harness leaves no checkout
    leased = {"bind": Bind.PROCESS, "sandbox": True, **(checkout or {})}
    async with (
        AsyncClient(socket) as client,
        client.checkout(instance, **leased) as held,
        AsyncSandbox(held, **(sandbox or {})) as box,
    ):
        yield box
