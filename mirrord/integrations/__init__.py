"""Adapters: what each harness calls its environment, sandbox, runtime or container, over mirrord.

Each imports its harness, so import the one you use; docs/integrations.md has them all. `kubernetes`
is a CSI plugin, a process of its own. The others stand on the public client alone and take three
settings: `socket`, `checkout` (arguments of `Client.checkout`: `environment`, `owner`, `ttl`,
`dataset`) and `sandbox` (arguments of `Sandbox`: `network`, `memory_bytes`, `processes`,
`variables`). They hold a checkout from the harness's start to its stop, and release it there; when
the harness is killed, its sandboxes and checkouts end too.
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
    """A sandbox over a new checkout of an instance, which is released at the end."""
    async with (
        AsyncClient(socket) as client,
        client.checkout(instance, **{"bind": Bind.PROCESS, **(checkout or {})}) as held,
        AsyncSandbox(held, **(sandbox or {})) as box,
    ):
        yield box
