"""Environments. Members see and use them; administrators build, because a recipe runs code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import anyio.to_thread
from pydantic import Field
from starlette.responses import Response

from ...errors import EnvironmentNotFoundError, InvalidRecipeError, InvalidRequestError
from ...protocol import BuildEnvironments, Environment, Operation, Recipe
from ..request import JSON_LIMIT_BYTES, Call, OwnedStream, Query, read_body

_LOG = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store"}
_PIECE, _POLL_S = 1 << 16, 0.2


class RecipesQuery(Query):
    filename: str = Field("the file", max_length=255, description="named in reports of faults")


class LogQuery(Query):
    follow: bool = Field(False, description="until the build has ended")


async def list_environments(call: Call) -> list[Environment]:
    return [_shown(call, each) for each in call.engine.environments.list()]


async def get_environment(call: Call) -> Environment:
    return _shown(call, call.engine.environments.get(call.path["key"]))


def _shown(call: Call, environment: Environment) -> Environment:
    """Members see no commit but base commits, and no finding: one can name what a fix has."""
    if call.is_admin:
        return environment
    prepared = [replace(each, findings=[]) for each in environment.prepared]
    return replace(environment, commit=None, findings=[], prepared=prepared)


async def build_environments(call: Call, body: BuildEnvironments) -> Operation:
    if not body.names and not body.dataset:
        raise InvalidRequestError(
            "cannot build environments: neither `names` nor `dataset` is given",
            hint="name instances, keys, or a dataset",
        )
    return await call.engine.work.build_environments(body, owner_uid=call.peer.uid)


async def import_recipes(call: Call, query: RecipesQuery) -> list[Recipe]:
    """Keep the recipes of a TOML file, before those of rows with the same key."""
    content = await read_body(call.request, JSON_LIMIT_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        fact = f"cannot read recipes from {query.filename}: it is not UTF-8"
        raise InvalidRecipeError(fact) from error
    return await call.engine.environments.import_recipes(text, query.filename)


async def remove_environment(call: Call) -> None:
    """Remove all that the name means; with a key alone, its imported recipe too."""
    await call.engine.environments.remove(call.path["key"])


async def get_log(call: Call, query: LogQuery) -> Response:
    """What the build printed, and the preparations after it."""
    path, is_running = call.engine.environments.find_log(call.path["key"])
    owned = AsyncExitStack()
    try:
        file = owned.enter_context(await anyio.to_thread.run_sync(lambda: path.open("rb")))
    except FileNotFoundError as error:
        fact = f"cannot find the log of environment {call.path['key']}: it is gone"
        raise EnvironmentNotFoundError(fact, hint="ask again") from error

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            was_running = is_running()  # before the read, so that the end is not missed
            if piece := await anyio.to_thread.run_sync(file.read, _PIECE):
                yield piece
            elif was_running and query.follow:
                await anyio.sleep(_POLL_S)
            else:
                return

    return OwnedStream(pieces(), _LOG, owned)
