"""Handlers of datasets, instances and environments.

Members see no patches, no findings and no commit except base commits. They may prepare datasets and
use environments. Administrators build environments, because a recipe runs code.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Annotated

import anyio
import anyio.to_thread
from pydantic import Field
from starlette.responses import Response

from .. import protocol
from ..datasets.fields import MAPPING_LIMIT_BYTES, parse_mapping
from ..datasets.formats import format_infos
from ..datasets.service import DatasetFile
from ..environments.images.importing import ARCHIVES, REGISTRY
from ..errors import AccessError, InvalidRecipeError, InvalidRequestError, NotFoundError
from ..model import DatasetName, View, parse_dataset_name, shown
from ..places import read_workdir
from .request import (
    DATASET_LIMIT_BYTES,
    JSON_LIMIT_BYTES,
    Call,
    OwnedStream,
    Query,
    read_body,
    spool_body,
    stream_file,
)

_Name = Annotated[str, Field(min_length=1, max_length=100)]


class ImportQuery(Query):
    filename: str | None = Field(
        None, min_length=1, max_length=255, description="used in error messages; default: name"
    )
    name: _Name | None = Field(None, description="default: filename without its suffixes")
    format: _Name | None = None
    mapping: str | None = Field(
        None, max_length=MAPPING_LIMIT_BYTES, description="TOML that maps columns to fields"
    )
    dry_run: bool = Field(False, description="only report what would change")


class ComparisonQuery(Query):
    to: _Name = Field(description="the other dataset")


class InstancesQuery(Query):
    dataset: _Name | None = None


class InstanceQuery(Query):
    view: View = View.AGENT
    dataset: str | None = None


async def list_datasets(call: Call) -> list[protocol.Dataset]:
    await call.engine.current_health()  # counts again if something changed
    return [_visible(call, dataset) for dataset in await call.engine.datasets.list()]


async def get_dataset(call: Call) -> protocol.Dataset:
    dataset = await call.engine.datasets.get(_dataset_name(call))
    await call.engine.current_health()
    return _visible(call, dataset)


def _dataset_name(call: Call) -> DatasetName:
    return parse_dataset_name(call.path["name"])


def _visible(call: Call, dataset: protocol.Dataset) -> protocol.Dataset:
    dataset = call.engine.readiness.describe(dataset)
    return dataset if call.is_admin else replace(dataset, unpinned=[], faults=[])


async def import_dataset(call: Call, query: ImportQuery) -> protocol.Operation:
    """Receive a dataset; the operation reads it, and fetches and pins its commits."""
    name = parse_dataset_name(query.name) if query.name else None
    if query.format and query.mapping is not None:
        raise InvalidRequestError(
            "cannot read the dataset: both a format and a mapping are given",
            hint="a mapping extends the columns of SWE-bench; leave out the format",
        )
    columns = None if query.mapping is None else parse_mapping(query.mapping)
    filename = query.filename or query.name
    if filename is None:
        raise InvalidRequestError(
            "cannot name the dataset: neither `name` nor `filename` is given", hint="add ?name=NAME"
        )
    await call.engine.room.ensure(f"import {filename}")
    path = await spool_body(call.request, call.engine.mirrors.quarantine, DATASET_LIMIT_BYTES)
    file = DatasetFile(path, filename, name, columns or query.format)
    dry_run, uid = query.dry_run, call.peer.uid
    return await call.engine.work.import_upload(file, dry_run=dry_run, owner_uid=uid)


async def prepare_dataset(call: Call, body: protocol.PrepareDataset) -> protocol.Operation:
    """Build the templates that checkouts of the instances need, without evicting others."""
    name = _dataset_name(call)
    return await call.engine.work.prepare_dataset(name, body.instances, owner_uid=call.peer.uid)


async def diff_datasets(call: Call, query: ComparisonQuery) -> protocol.DatasetDiff:
    a, b = _dataset_name(call), parse_dataset_name(query.to)
    return await call.engine.datasets.compare(a, b)


async def export_dataset(call: Call) -> Response:
    """Stream the rows with all answers, as canonical JSON lines sorted by id."""
    async with call.engine.datasets.exported(_dataset_name(call)) as file:
        return stream_file(file, {"content-type": "application/jsonl", "cache-control": "no-store"})


async def remove_dataset(call: Call) -> protocol.Operation | None:
    """Remove a dataset and its pins; as an operation while mirrors of it wait for a slow store."""
    name, remove = _dataset_name(call), call.engine.datasets.remove
    return await call.engine.operations.patiently(
        "dataset.remove", name, lambda progress: remove(name, progress), owner_uid=call.peer.uid
    )


async def list_formats(call: Call) -> list[protocol.FormatInfo]:
    return format_infos()


async def list_instances(call: Call, query: InstancesQuery) -> list[protocol.InstanceName]:
    """List ids. They can reveal the answer: SWE-bench Pro's contain the gold commit."""
    text = query.dataset
    dataset = parse_dataset_name(text) if text else None
    return [
        protocol.InstanceName(id=identity)
        for identity in await call.engine.datasets.list_instance_ids(dataset)
    ]


async def get_instance(call: Call, query: InstanceQuery) -> protocol.Instance:
    is_grader = query.view is View.GRADER
    if is_grader and not call.is_admin:
        raise AccessError(
            f"cannot show instance {call.path['id']} in the grader view: "
            "only an administrator may see its patches",
            hint="leave out view=grader, or see [access] admins in the configuration",
        )
    return await call.engine.datasets.instance(call.path["id"], is_grader, query.dataset)


# -- environments --------------------------------------------------------------------------------

_LOG = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store"}
# for the next lines of a log that grows; a file tells nobody of them
_CHUNK_BYTES, _POLL_S = 1 << 16, 0.2


class RecipesQuery(Query):
    filename: str = Field("the file", max_length=255, description="used in error messages")


class ImageQuery(Query):
    source: str = Field(min_length=1, max_length=1000, description="docker://…, or KIND:NAME")
    key: _Name | None = Field(None, description="default: named like the source")
    tree: str | None = Field(None, max_length=200, description="default: as it is found")


class LogQuery(Query):
    follow: bool = Field(False, description="stream until the build has ended")


async def list_environments(call: Call) -> list[protocol.Environment]:
    return [
        _visible_environment(call, environment) for environment in call.engine.environments.list()
    ]


async def get_environment(call: Call) -> protocol.Environment:
    return _visible_environment(call, call.engine.environments.get(call.path["key"]))


def _visible_environment(call: Call, environment: protocol.Environment) -> protocol.Environment:
    """Hide from members the setup commit, findings, which can name a file of the fix, and the
    source of an image, which can name its commit.
    """
    if call.is_admin:
        return environment
    prepared = [replace(preparation, findings=[]) for preparation in environment.prepared]
    return replace(environment, commit=None, source=None, findings=[], prepared=prepared)


async def build_environments(call: Call, body: protocol.BuildEnvironments) -> protocol.Operation:
    if not body.names and not body.dataset:
        raise InvalidRequestError(
            "cannot build environments: neither `names` nor `dataset` is given",
            hint="name instances, keys, or a dataset",
        )
    return await call.engine.work.build_environments(body, owner_uid=call.peer.uid)


async def import_recipes(call: Call, query: RecipesQuery) -> list[protocol.Recipe]:
    """Store the recipes of a TOML file. They take precedence over those of rows."""
    content = await read_body(call.request, JSON_LIMIT_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        fact = f"cannot read recipes from {query.filename}: it is not UTF-8"
        raise InvalidRecipeError(fact, hint="save the file as UTF-8") from error
    return await call.engine.environments.import_recipes(text, query.filename)


async def import_image(call: Call, query: ImageQuery) -> protocol.Operation:
    """Import an image of a registry, or the uploaded archive, as an environment."""
    kind, _, name = query.source.partition(":")
    if query.tree is not None:
        try:
            read_workdir(query.tree)
        except ValueError as error:
            fact = f"cannot show the tree at {shown(query.tree)}: it {error}"
            raise InvalidRequestError(fact, hint="for example /testbed") from error
    request = protocol.ImportImage(source=query.source, key=query.key, tree=query.tree)
    engine, path = call.engine, None
    if not query.source.startswith(REGISTRY):
        if kind not in ARCHIVES or not name:
            raise InvalidRequestError(
                f"cannot import an image of {shown(query.source)}: no such kind of source",
                hint=f"one is {REGISTRY}REPOSITORY:TAG, or an upload, {', '.join(ARCHIVES)}",
            )
        await engine.room.ensure("import an image")
        limit = engine.settings().environments.image_bytes
        path = await spool_body(call.request, engine.mirrors.quarantine, limit)
    return await engine.work.import_image(request, path, owner_uid=call.peer.uid)


async def remove_environment(call: Call) -> None:
    """Remove all environments that the name selects; for a key, also its imported recipe."""
    await call.engine.environments.remove(call.path["key"])


async def get_log(call: Call, query: LogQuery) -> Response:
    """Stream the log of a build and of the preparations after it."""
    path, is_running = call.engine.environments.find_log(call.path["key"])
    owned = AsyncExitStack()
    try:
        file = owned.enter_context(await anyio.to_thread.run_sync(lambda: path.open("rb")))
    except FileNotFoundError as error:
        fact = f"cannot find the log of environment {call.path['key']}: it was removed"
        raise NotFoundError(fact, hint="retry") from error

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            was_running = is_running()  # asked before the read, or the end could be missed
            if piece := await anyio.to_thread.run_sync(file.read, _CHUNK_BYTES):
                yield piece
            elif was_running and query.follow:
                await anyio.sleep(_POLL_S)
            else:
                return

    return OwnedStream(pieces(), _LOG, owned)
