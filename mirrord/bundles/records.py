"""The catalog's records in a bundle: pins, datasets and their rows.

They are validated like a request, and hold no secrets: a URL that may have one is left out.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import errors
from ..catalog import DatasetHead, MirrorRow, PinRow, decode_row, encode_row
from ..errors import full_disk_named
from ..mirrors.repository import Repository
from ..mirrors.upstreams.upstream import public_url
from ..model import MirrorName, parse_dataset_name
from ..protocol import Dataset, RowFault
from ..quoting import quote_name

_FORMAT = 1


class _Stored(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)


class BundledPin(_Stored):
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    owner: Annotated[str, Field(max_length=200)]
    reason: Annotated[str, Field(max_length=10_000)] = ""
    created_at: datetime


class BundledDataset(_Stored):
    """A dataset without rows; those of this mirror are in `dataset-NAME.jsonl`."""

    name: Annotated[str, Field(max_length=100)]
    format: Annotated[str, Field(max_length=100)]
    source: Annotated[str, Field(max_length=4096)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    imported_at: datetime
    fault_count: int = 0
    faults: list[RowFault] = []
    rules: dict[str, int] = {}


class BundleRecords(_Stored):
    """The catalog's records of a mirror. `url` is None where it is unknown or has a secret.

    `default_branch` is in its printable form.
    """

    format: int = _FORMAT
    mirror: str
    url: str | None = None
    default_branch: str | None = None
    pins: tuple[BundledPin, ...] = ()
    datasets: tuple[BundledDataset, ...] = ()


def records_of(row: MirrorRow, pins: list[PinRow], datasets: list[Dataset]) -> BundleRecords:
    ordered = sorted(pins, key=lambda pin: (pin.owner, pin.commit))
    return BundleRecords(
        mirror=str(row.name),
        url=public_url(row.url),
        default_branch=None if row.default_branch is None else quote_name(row.default_branch),
        pins=tuple(map(BundledPin.model_validate, ordered)),
        datasets=tuple(BundledDataset.model_validate(dataset.to_json()) for dataset in datasets),
    )


async def write_records(
    repository: Repository, objects: Path, records: BundleRecords, rows: dict[str, Path]
) -> str:
    """Write records, and the rows of datasets, into the object directory `objects`.

    Returns their commit, which is the same for the same records.
    """
    files: dict[str, bytes | Path] = {f"dataset-{name}.jsonl": path for name, path in rows.items()}
    files["mirror.json"] = records.model_dump_json(indent=1).encode()
    message, doing = f"records of {records.mirror}", "write the records of a mirror"
    return await repository.write_commit(message, files, objects, doing=doing)


async def read_records(repository: Repository, commit: str) -> BundleRecords:
    words = ("cat-file", "blob", f"{commit}:mirror.json")
    # 128: the commit has no such file, and nothing is no valid JSON
    done = await repository.run(*words, ok=(0, 128), doing="read a bundle's records")
    failure = "cannot read the records of the bundle"
    try:
        records = BundleRecords.model_validate_json(done.stdout)
    except ValidationError as error:
        fact = error.errors(include_url=False)[0]["msg"]
        hint = "it was not made by `mirrord bundle create`"
        raise errors.InvalidBundleError(f"{failure}: {fact}", hint=hint) from error
    if records.format > _FORMAT:
        fact = f"their format is {records.format}, and this mirrord reads up to {_FORMAT}"
        raise errors.InvalidBundleError(f"{failure}: {fact}", hint="use a newer mirrord")
    return records


# by name, datasets without rows, each with a file of checked rows for the catalog
Spools = dict[str, tuple[DatasetHead, Path]]


async def spool_datasets(scratch: Repository, commit: str | None, records: BundleRecords) -> Spools:
    """Check the rows of the datasets in a bundle; raise InvalidBundleError for any bad row.

    Returns nothing where the records are of a mirror with another name.
    """
    if commit is None or MirrorName.parse(records.mirror).key != scratch.name.key:
        return {}
    raw = scratch.path.parent / "rows.raw"
    spools: Spools = {}

    def check_rows(spool: Path) -> None:
        with full_disk_named("quarantine"), raw.open("rb") as lines, spool.open("wb") as out:
            for number, line in enumerate(lines, 1):
                try:
                    row = decode_row(line)
                except (ValueError, KeyError, TypeError, errors.MirrordError) as error:
                    fact = f"row {number} of a dataset is invalid: {error}"
                    raise errors.InvalidBundleError(f"cannot import the bundle: {fact}") from error
                if row.mirror.key == scratch.name.key:
                    out.write(encode_row(row))

    for number, dataset in enumerate(records.datasets):
        words = ("cat-file", "blob", f"{commit}:dataset-{dataset.name}.jsonl")
        doing = "read a bundle's records"
        done = await scratch.run(*words, stdout_path=raw, ok=(0, 128), doing=doing)
        if done.status != 0:
            fact = f"the rows of dataset {dataset.name} are not in it"
            raise errors.InvalidBundleError(f"cannot import the bundle: {fact}")
        spool = raw.with_name(f"rows-{number}.jsonl")
        await to_thread.run_sync(check_rows, spool)
        fields = dict(dataset) | {"name": parse_dataset_name(dataset.name), "refused": {}}
        spools[dataset.name] = DatasetHead(**fields), spool
    return spools
