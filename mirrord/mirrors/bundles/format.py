"""The head of a bundle file: what it holds, and what it builds on. The pack behind it is git's business.

Reads files that anybody may have written: within bounds, and every name and id is checked. Starts no git.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, BinaryIO

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...catalog import DatasetHead, MirrorRow, PinRow
from ...errors import (
    CorruptObjectError,
    GitFailedError,
    InvalidBundleError,
    InvalidUrlError,
    MirrordError,
)
from ...git.environment import STRICT
from ...git.errors import masked_url
from ...host.processes import memory_limit_bytes
from ...model import parse_dataset_name, shown
from ...protocol import Dataset, Progress, RowFault
from ..quarantine import STREAM_BIG_FILES, within_disk
from ..repository import Refs, Repository
from ..upstream import parse_upstream

_VERSIONS = {b"# v2 git bundle\n": 2, b"# v3 git bundle\n": 3}
_PLAIN = b"@object-format=sha1\n"
_MAX_LINE = 8192
_MAX_LINES = 10_000_000
_PREREQUISITE = re.compile(r"-([0-9a-f]{40})(?: .*)?")
_REF = re.compile(r"([0-9a-f]{40}) (\S.*)")


@dataclass(frozen=True, slots=True)
class BundleHeader:
    """`refs` may hold `HEAD`. `prerequisites` are commits that must be there already; `pack_at` is where the pack begins."""

    prerequisites: tuple[str, ...]
    refs: Refs
    pack_at: int


def header_bytes(prerequisites: Iterable[str], refs: Refs) -> bytes:
    """The head of a bundle as git writes it; the pack follows."""
    lines = [
        "# v2 git bundle",
        *(f"-{oid} " for oid in sorted(prerequisites)),
        *(f"{oid} {ref}" for ref, oid in sorted(refs.items())),
    ]
    return "".join(f"{line}\n" for line in [*lines, ""]).encode("utf-8", "surrogateescape")


def read_header(path: Path) -> BundleHeader:
    """Read the head of a bundle file; raises InvalidBundleError."""
    with path.open("rb") as file:
        version = _VERSIONS.get(file.readline(_MAX_LINE))
        if version is None:
            raise _refused("it does not begin like a git bundle")
        prerequisites: list[str] = []
        refs: Refs = {}
        for line in _lines(file, version):
            if found := _PREREQUISITE.fullmatch(line):
                prerequisites.append(found[1])
            elif found := _REF.fullmatch(line):
                refs[found[2]] = found[1]
            else:
                raise _refused(f"{shown(line)} is no line of a bundle's head")
        if not refs:
            raise _refused("it holds no refs")
        return BundleHeader(tuple(prerequisites), refs, file.tell())


def _lines(file: BinaryIO, version: int) -> Iterator[str]:
    """The lines up to the empty one that ends the head."""
    for _ in range(_MAX_LINES):
        raw = file.readline(_MAX_LINE)
        if raw == b"\n":
            return
        if not raw.endswith(b"\n"):
            raise _refused("it ends in the middle of its head")
        if version == 3 and raw.startswith(b"@"):
            if raw != _PLAIN:
                raise _refused(
                    f"it needs {shown(raw.decode('utf-8', 'replace').strip())}, which mirrors do not have"
                )
            continue
        yield raw[:-1].decode("utf-8", "surrogateescape")
    raise _refused("it holds too many refs")


def _refused(fact: str) -> InvalidBundleError:
    return InvalidBundleError(
        f"cannot read the bundle: {fact}",
        hint="make it with `mirrord bundle create`, or with `git bundle create` of git 2.x",
    )


_DEADLINE = timedelta(hours=6)
_SILENCE = timedelta(hours=1)


async def stream_bundle(
    repository: Repository, objects: Path, refs: Refs, prerequisites: frozenset[str]
) -> AsyncGenerator[bytes]:
    """A bundle with all that `refs` reach and `prerequisites` do not; `objects` holds what the mirror itself does not.

    git counts before it writes: what is missing is an error before the second piece.
    """
    wanted = [*sorted(set(refs.values())), *(f"^{oid}" for oid in sorted(prerequisites))]
    yield header_bytes(prerequisites, refs)
    async with repository.git.stream(
        "pack-objects", "--revs", "--stdout", "--thin", "--delta-base-offset", "-q",
        git_dir=repository.path,
        stdin="".join(f"{line}\n" for line in wanted).encode("ascii"),
        quarantine_objects=objects,
        quiet_timeout=_SILENCE,
        doing=f"bundle mirror {repository.name}",
    ) as pack:  # fmt: skip
        async for chunk in pack:
            yield chunk


async def unbundle(
    repository: Repository, path: Path, progress: Callable[[Progress], None] | None = None
) -> BundleHeader:
    """Add the objects of a bundle file to `repository`, each checked; answers the bundle's head. Moves no ref.

    Raises InvalidBundleError where the file is damaged, hostile, or builds on commits that `repository` has not.
    """
    header = await anyio.to_thread.run_sync(read_header, path)
    if absent := sorted(await repository.absent(header.prerequisites)):
        raise InvalidBundleError(
            f"cannot import the bundle: it builds on {len(absent)} commits that are not here, {absent[0]} for one",
            hint="first import the bundle that was made at the record this one was made since",
            absent=absent[:100],
        )
    try:
        await index_bundle(
            repository, path, header, STRICT, progress=progress, doing="import the bundle"
        )
    except (GitFailedError, CorruptObjectError) as error:
        raise _bad(error, "it is damaged, or holds what fsck refuses: get it again") from error
    return header


async def index_bundle(
    repository: Repository,
    path: Path,
    header: BundleHeader,
    *options: str,
    progress: Callable[[Progress], None] | None = None,
    doing: str,
) -> None:
    """Add the objects of a bundle file to `repository`, each hashed, within bounds; raises GitFailedError, CorruptObjectError."""
    with path.open("rb", buffering=0) as pack:
        pack.seek(header.pack_at)
        await repository.git.run(
            *STREAM_BIG_FILES, "index-pack", "--stdin", "--fix-thin", *options, "-v",
            git_dir=repository.path,
            stdin=pack,
            timeout=_DEADLINE,
            memory_bytes=memory_limit_bytes(),
            progress=within_disk(repository.path, progress, doing),
            doing=doing,
        )  # fmt: skip


async def verify_closures(repository: Repository, refs: Refs) -> None:
    """Prove that everything the refs of a bundle reach is there; raises InvalidBundleError."""
    try:
        if absent := await repository.absent(refs.values()):
            raise InvalidBundleError(
                f"cannot import the bundle: {min(absent)} is named by it and not in it"
            )
        await repository.verify_closure(sorted(set(refs.values())))
    except (GitFailedError, CorruptObjectError) as error:
        raise _bad(error, "it names commits whose objects are not in it: get it again") from error


def _bad(error: MirrordError, hint: str) -> InvalidBundleError:
    fact = error.message.partition(": ")[2] or error.message
    return InvalidBundleError(
        f"cannot import the bundle: {fact}", hint=f"nothing was changed; {hint}"
    )


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
