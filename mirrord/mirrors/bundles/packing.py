"""The pack of a bundle, out and in: streamed from a mirror, and indexed strictly into a repository that waits in quarantine.

Going out nothing is written but the records: git waits while the reader does. Coming in, nothing is trusted: every object is
hashed and checked by fsck, every ref's closure is walked. Neither moves a ref of a mirror.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from pathlib import Path

import anyio

from ...errors import CorruptObjectError, GitFailedError, InvalidBundleError, MirrordError
from ...git.environment import STRICT
from ...host.processes import memory_limit_bytes
from ...protocol import Progress
from ..bounds import STREAM_BIG_FILES, within_disk
from ..repository import Refs, Repository
from .header import BundleHeader, header_bytes, read_header

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
