"""What the catalog knows of a mirror, as it travels in a bundle: messages, written to git objects and read back checked.

Never holds a secret: a URL that cannot be shown whole is left out. What is read was written by anybody, and is checked like a
request.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...catalog import DatasetHead, MirrorRow, PinRow
from ...errors import InvalidBundleError, InvalidUrlError
from ...git.command import masked_url
from ...model import parse_dataset_name
from ...protocol import Dataset, RowFault
from ..repository import Repository
from ..upstream import parse_upstream

MIRROR_FILE = "mirror.json"
FORMAT = 1
_DOING = "write the records of a bundle"
_Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class BundledPin(_Record):
    commit: _Commit
    owner: Annotated[str, Field(max_length=200)]
    reason: Annotated[str, Field(max_length=10_000)] = ""
    created_at: datetime


class BundledDataset(_Record):
    """The head of a dataset; its rows about this mirror are beside it in `dataset-NAME.jsonl`."""

    name: Annotated[str, Field(max_length=100)]
    format: Annotated[str, Field(max_length=100)]
    source: Annotated[str, Field(max_length=4096)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    imported_at: datetime
    fault_count: int = 0
    faults: tuple[RowFault, ...] = ()
    rules: dict[str, int] = Field(default_factory=dict)

    @classmethod
    def of(cls, dataset: Dataset) -> BundledDataset:
        return cls.model_validate(dataset.to_json())

    def head(self) -> DatasetHead:
        """Raises InvalidNameError."""
        return DatasetHead(
            name=parse_dataset_name(self.name),
            format=self.format,
            source=self.source,
            sha256=self.sha256,
            imported_at=self.imported_at,
            fault_count=self.fault_count,
            faults=list(self.faults),
            rules=self.rules,
            refused={},
        )


class Records(_Record):
    """`url` is None where it holds a secret, or where nobody knows it."""

    format: int = FORMAT
    mirror: str
    url: str | None = None
    default_branch: str | None = None
    pins: tuple[BundledPin, ...] = ()
    datasets: tuple[BundledDataset, ...] = ()


def records_of(row: MirrorRow, pins: list[PinRow], datasets: list[Dataset]) -> Records:
    return Records(
        mirror=str(row.name),
        url=_public(row.url),
        default_branch=row.default_branch,
        pins=tuple(
            BundledPin(
                commit=pin.commit, owner=pin.owner, reason=pin.reason, created_at=pin.created_at
            )
            for pin in sorted(pins, key=lambda pin: (pin.owner, pin.commit))
        ),
        datasets=tuple(BundledDataset.of(dataset) for dataset in datasets),
    )


def _public(url: str) -> str | None:
    try:
        bare = parse_upstream(url).remote.url
    except InvalidUrlError:
        return None
    return bare if masked_url(bare) == bare else None


async def write_records(
    repository: Repository, objects: Path, records: Records, rows: dict[str, Path]
) -> str:
    """Store the records in the object directory `objects`, which borrows from the repository; answers their commit."""
    files: dict[str, bytes | Path] = {f"dataset-{name}.jsonl": path for name, path in rows.items()}
    files[MIRROR_FILE] = records.model_dump_json(indent=1).encode()
    entries = []
    for name, content in sorted(files.items()):
        made = await repository.git.run(
            "hash-object",
            "-w",
            "--stdin",
            git_dir=repository.path,
            stdin=content,
            quarantine_objects=objects,
            doing=_DOING,
        )
        entries.append(f"100644 blob {made.lines[0]}\t{name}\n")
    tree = await repository.git.run(
        "mktree",
        git_dir=repository.path,
        stdin="".join(entries).encode(),
        quarantine_objects=objects,
        doing=_DOING,
    )
    commit = await repository.git.run(
        "commit-tree", "-m", f"records of {records.mirror}", tree.lines[0],
        git_dir=repository.path,
        quarantine_objects=objects,
        doing=_DOING,
    )  # fmt: skip
    return commit.lines[0]


async def read_records(repository: Repository, commit: str) -> Records:
    """Raises InvalidBundleError."""
    found = await repository.git.run(
        "cat-file",
        "blob",
        f"{commit}:{MIRROR_FILE}",
        git_dir=repository.path,
        ok=(0, 128),
        doing="read a bundle's records",
    )
    try:
        records = Records.model_validate_json(found.stdout)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidBundleError(
            f"cannot read the records of the bundle: {first['msg']}",
            hint="it was not made by `mirrord bundle create`",
        ) from error
    if records.format > FORMAT:
        raise InvalidBundleError(
            f"cannot read the records of the bundle: they are of format {records.format}, this is {FORMAT}",
            hint="use a newer mirrord",
        )
    return records


async def extract_rows(repository: Repository, commit: str, dataset: str, path: Path) -> bool:
    """Copy the rows of one dataset into a file; False where the records have none."""
    found = await repository.git.run(
        "cat-file", "blob", f"{commit}:dataset-{dataset}.jsonl",
        git_dir=repository.path,
        stdout_path=path,
        ok=(0, 128),
        doing="read a bundle's records",
    )  # fmt: skip
    return found.status == 0
