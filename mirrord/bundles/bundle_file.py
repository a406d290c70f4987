"""The parts of a bundle file: header, pack, and the catalog's records.

Nothing read is trusted: the header has bounds, fsck checks every object, the closure of every ref
is walked, records are validated like a request. Records hold no secrets: a URL that may have one is
left out. Moves no ref of a mirror.
"""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import errors
from ..catalog import DatasetHead, MirrorRow, PinRow, decode_row, encode_row
from ..errors import full_disk_named
from ..git.command import lines_of
from ..git.fsck import STRICT
from ..host.files import open_plain
from ..host.processes import memory_limit_bytes
from ..mirrors.quarantine import STREAM_BIG_FILES
from ..mirrors.repository import Refs, Repository
from ..mirrors.upstreams.upstream import public_url
from ..model import MirrorName, parse_dataset_name, shown
from ..protocol import Dataset, ProgressSink, RowFault
from ..quoting import decode_name, encode_name, quote_name

# -- header and pack ----------------------------------------------------------------------------


class BundleHeader(NamedTuple):
    """A bundle's header. The file builds on `prerequisites`; the pack begins at `pack_at`."""

    prerequisites: tuple[str, ...]
    refs: Refs
    pack_at: int


def header_bytes(prerequisites: Iterable[str], refs: Refs) -> bytes:
    """Format the header of a bundle, which the pack follows."""
    builds_on = (f"-{oid} " for oid in sorted(prerequisites))
    named = (f"{refs[ref]} {ref}" for ref in sorted(refs, key=encode_name))
    return lines_of(["# v2 git bundle", *builds_on, *named, ""])


_PREREQUISITE = re.compile(r"-([0-9a-f]{40})(?: .*)?")
_REF = re.compile(r"([0-9a-f]{40}) (\S.*)")


def read_header(path: Path) -> BundleHeader:
    """Read the header of a bundle file; raises InvalidBundleError."""

    def refused(fact: str) -> errors.InvalidBundleError:
        return errors.InvalidBundleError(
            f"cannot read the bundle: {fact}",
            hint="make it with `mirrord bundle create`, or with `git bundle create` of git 2.x",
        )

    prerequisites: list[str] = []
    refs: Refs = {}
    with open_plain(path) as file:
        # more than any line: a ref is a path too, of 4,096 bytes at most
        signature = file.readline(8192)
        if signature not in {b"# v2 git bundle\n", b"# v3 git bundle\n"}:
            raise refused("it has no signature of a git bundle")
        # a bound, because a header without end would fill the memory
        for _ in range(10_000_000):
            raw = file.readline(8192)
            if raw == b"\n":
                break
            if not raw.endswith(b"\n"):
                raise refused("its header is cut short")
            line = decode_name(raw[:-1])
            # a capability: another hash, or a filter, which leaves objects out (gitformat-bundle)
            if b"v3" in signature and raw.startswith(b"@"):
                if line != "@object-format=sha1":
                    raise refused(f"it needs {shown(line)}, which mirrors do not support")
            elif match := _PREREQUISITE.fullmatch(line):
                prerequisites.append(match[1])
            elif match := _REF.fullmatch(line):
                refs[match[2]] = match[1]
            else:
                raise refused(f"{shown(line)} is not a line of a bundle's header")
        else:
            raise refused("it holds too many refs")
        if not refs:
            raise refused("it holds no refs")
        return BundleHeader(tuple(prerequisites), refs, file.tell())


async def unbundle(
    repository: Repository, path: Path, progress: ProgressSink | None = None
) -> BundleHeader:
    """Add the objects of a bundle file to `repository`, each checked; return its header.

    Raises InvalidBundleError where the file is damaged, hostile, or builds on missing commits.
    """
    header = await to_thread.run_sync(read_header, path)
    if absent := sorted(await repository.absent(header.prerequisites)):
        raise errors.InvalidBundleError(
            f"cannot import the bundle: it builds on {len(absent)} commits that are not here,"
            f" such as {absent[0]}",
            hint="import the earlier bundle first; this one is incremental",
            absent=absent[:100],
        )
    doing = "import the bundle"
    try:
        await index_bundle(repository, path, header, STRICT, progress=progress, doing=doing)
    except (errors.GitFailedError, errors.CorruptObjectError) as error:
        raise _bad(error, "it is damaged, or holds what fsck refuses: get it again") from error
    return header


async def index_bundle(
    repository: Repository,
    path: Path,
    header: BundleHeader,
    *options: str,
    progress: ProgressSink | None = None,
    doing: str,
) -> None:
    """Add the objects of a bundle file to `repository`, within bounds.

    Raises GitFailedError, CorruptObjectError.
    """
    # without the buffer: git reads on where the descriptor stands
    with open_plain(path).detach() as pack:
        pack.seek(header.pack_at)
        await repository.run(
            # --fix-thin: an incremental bundle has deltas on objects that are only here
            # -v: the disk's reserve is looked at with each line of progress
            *STREAM_BIG_FILES, "index-pack", "--stdin", "--fix-thin", *options, "-v",
            stdin=pack,
            timeout=timedelta(hours=6),
            memory_bytes=memory_limit_bytes(),
            progress=progress,
            doing=doing,
        )  # fmt: skip


async def verify_closures(repository: Repository, refs: Refs) -> None:
    """Prove that nothing is missing of what the refs reach; raises InvalidBundleError."""
    try:
        if absent := await repository.absent(refs.values()):
            fact = f"it names {min(absent)}, which it does not contain"
            raise errors.InvalidBundleError(f"cannot import the bundle: {fact}")
        await repository.verify_closure(sorted(set(refs.values())))
    except (errors.GitFailedError, errors.CorruptObjectError) as error:
        raise _bad(error, "it names commits whose objects are not in it: get it again") from error


def _bad(error: errors.MirrordError, advice: str) -> errors.InvalidBundleError:
    fact, hint = error.message.partition(": ")[2] or error.message, f"nothing was changed; {advice}"
    return errors.InvalidBundleError(f"cannot import the bundle: {fact}", hint=hint)


# -- parts: the mirrors of submodules --------------------------------------------------------------
#
# Each has its refs below a name of its own, in the same pack: to git they are refs like others.

MODULES = "refs/mirrord/modules/"


def part_of(name: MirrorName, refs: Refs) -> Refs:
    """Return the refs of a submodule's mirror as they are named in the bundle of another."""
    return {f"{MODULES}{name}/{ref}": oid for ref, oid in refs.items()}


def split_parts(refs: Refs) -> tuple[Refs, dict[str, Refs]]:
    """Return the refs of the bundle's own mirror, and those of submodules' mirrors by their names.

    Raises InvalidNameError.
    """
    own, parts = dict[str, str](), dict[str, Refs]()
    for ref, oid in refs.items():
        name, _, inner = ref.removeprefix(MODULES).partition("/")
        if not ref.startswith(MODULES):
            own[ref] = oid
        elif inner:
            parts.setdefault(str(MirrorName.parse(name)), {})[inner] = oid
    return own, parts


async def take_part(source: Repository, part: Repository, tips: Iterable[str]) -> None:
    """Copy what some tips reach into an empty repository; raises InvalidBundleError."""
    try:
        await source.run(
            "pack-objects", "--revs", "--delta-base-offset", "-q", str(part.objects / "pack/pack"),
            stdin=lines_of(sorted({*tips})),
            timeout=timedelta(hours=6),
            doing=f"import the bundle of mirror {part.name}",
        )  # fmt: skip
    except (errors.GitFailedError, errors.CorruptObjectError) as error:
        raise _bad(error, "it names commits whose objects are not in it: get it again") from error


# -- records ----------------------------------------------------------------------------------

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


Spools = dict[str, tuple[DatasetHead, Path]]
"""By name, datasets without rows, each with a file of checked rows for the catalog."""


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
