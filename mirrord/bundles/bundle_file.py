"""The parts of a bundle file: header, pack, and the mirrors of submodules.

Nothing read is trusted: the header has bounds, fsck checks every object, the closure of every ref
is walked. Moves no ref of a mirror.
"""

import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from anyio import to_thread

from .. import errors
from ..git.command import lines_of
from ..git.fsck import STRICT
from ..host.files import open_plain
from ..host.processes import memory_limit_bytes
from ..mirrors.quarantine import STREAM_BIG_FILES
from ..mirrors.repository import Refs, Repository
from ..model import MirrorName, shown
from ..protocol import ProgressSink
from ..quoting import decode_name, encode_name


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
