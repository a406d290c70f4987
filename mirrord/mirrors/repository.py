"""A mirror's bare repository: its configuration, its refs on disk, queries to git.

Takes no lock and makes no decision.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import to_thread

from ..errors import DamagedMirrorError, full_disk_named
from ..git.batch import object_info
from ..git.command import Git, GitResult, lines_of
from ..git.packwriter import write_loose
from ..host.files import opened, read_plain, sync_file, sync_tree
from ..model import MirrorName
from ..presence import is_dir, matching
from ..quoting import decode_name, encode_name, legible

OURS = "refs/mirrord/"
HISTORY = "refs/mirrord/history"
KEPT = "refs/mirrord/kept/"
PINS = "refs/mirrord/pins/"
INCOMING = "refs/mirrord/incoming/"

# full ref name to object id
Refs = dict[str, str]

_CONTENT = (
    "HEAD", "packed-refs", "refs/*/**/*", "worktrees/*", "*/[0-9a-f][0-9a-f]/*", "**/pack-*",
    "objects/pack/*.pack", "objects/pack/*.idx",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Repository:
    """The bare repository of a mirror, in its place or under construction in quarantine."""

    git: Git
    name: MirrorName
    path: Path

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    async def run(self, *args: str, doing: str, **options: Any) -> GitResult:
        """Call `Git.run` in this repository."""
        return await self.git.run(*args, git_dir=self.path, doing=doing, **options)

    async def write_commit(
        self, message: str, files: Mapping[str, bytes | Path], objects: Path, **options: Any
    ) -> str:
        """Write files as a commit into the object directory `objects`; options are `run`'s.

        The id is the same for the same message and files.
        """
        # the same files make the same commit, whenever it is written
        dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "@0 +0000")

        async def write(*words: str, stdin: bytes | Path | None = None) -> str:
            made = await self.run(
                *words, stdin=stdin, quarantine_objects=objects, env=dates, **options
            )
            return made.lines[0]

        entries = [
            f"100644 blob {await write('hash-object', '-w', '--stdin', stdin=content)}\t{name}"
            for name, content in sorted(files.items())
        ]
        tree = await write("mktree", stdin=lines_of(entries))
        return await write("commit-tree", "-m", message, tree)

    def is_stub(self) -> bool:
        """True if it is a directory with no ref, no object and no HEAD in it."""
        return is_dir(self.path) and not any(any(matching(self.path, it)) for it in _CONTENT)

    async def create(self, *, lender: "Repository | None" = None) -> None:
        """Make an empty repository at `path`; with `lender`, one that also reads its objects."""

        def make() -> None:
            for name in ("objects/info", "objects/pack", "refs/heads", "refs/tags"):
                (self.path / name).mkdir(parents=True)
            (self.path / "config").write_text(CONFIGURATION, encoding="ascii")
            (self.path / "HEAD").write_text("ref: refs/heads/main\n", encoding="ascii")
            if lender:
                alternates = self.objects / "info/alternates"
                alternates.write_text(f"{lender.objects}\n", encoding="utf-8")
            sync_tree(self.path)

        with full_disk_named(f"mirror {self.name}"):
            await to_thread.run_sync(make)

    async def must_be_ours(self) -> None:
        """Raise DamagedMirrorError where git cannot open the mirror, or misreads it.

        With `extensions.objectFormat = sha256` git (2.39) sees no tag, and a sync would drop all of
        them. With a promisor remote it accepts missing objects.
        """
        if fact := await to_thread.run_sync(_find_fault, self.path):
            hint = f"`mirrord heal {self.name}` repairs it"
            raise DamagedMirrorError(f"cannot use mirror {self.name}: {fact}", hint=hint)

    async def all_refs(self) -> Refs:
        """Return every ref, those below `refs/mirrord/` included."""
        refs = await to_thread.run_sync(read_refs_of, self.path)
        if refs is not None:
            return refs
        doing = f"list refs of mirror {self.name}"
        listing = await self.run("for-each-ref", "--format=%(objectname) %(refname)", doing=doing)
        return {ref: oid for oid, _, ref in (line.partition(" ") for line in listing.lines)}

    async def head(self) -> str | None:
        """Return the ref that HEAD names."""
        if head := await to_thread.run_sync(read_head, self.path):
            return head
        doing = f"read HEAD of mirror {self.name}"
        done = await self.run("symbolic-ref", "--quiet", "HEAD", ok=(0, 1), doing=doing)
        return done.lines[0] if done.lines else None

    async def set_head(self, ref: str) -> None:
        await self.run("symbolic-ref", "HEAD", ref, doing=f"set HEAD of mirror {self.name}")
        # git (2.39) does not flush it; a power cut would leave it empty
        await to_thread.run_sync(sync_file, self.path / "HEAD")

    async def kinds(self, oids: Iterable[str]) -> dict[str, str]:
        """Return the kind of each id's object: `missing` without one."""
        wanted = sorted(set(oids))
        doing = f"look up objects of mirror {self.name}"
        objects = await object_info(self.git, self.path, wanted, doing=doing)
        return {info.name: info.kind for info in objects}

    async def absent(self, oids: Iterable[str]) -> set[str]:
        """Return the ids that have no object here; what those objects refer to is not checked."""
        return {oid for oid, kind in (await self.kinds(oids)).items() if kind == "missing"}

    async def commits_of(self, oids: Iterable[str]) -> set[str]:
        """Return the commits among the objects, and those that tags among them lead to."""
        peeled = [f"{oid}^{{commit}}" for oid in sorted(set(oids))]
        doing = f"look up commits of mirror {self.name}"
        objects = await object_info(self.git, self.path, peeled, doing=doing)
        return {info.oid for info in objects if info.exists}

    async def is_ancestor(self, old: str, new: str) -> bool:
        """True if a move of a ref from `old` to `new` loses nothing; False for non-commits."""
        words = ("merge-base", "--is-ancestor", old, new)
        doing = f"compare commits of {self.name}"
        # 1 is no, 128 says that one of them is no commit or missing
        return (await self.run(*words, ok=(0, 1, 128), doing=doing)).status == 0

    async def is_public(self, commit: str) -> bool:
        """True if a ref that follows upstream reaches the commit."""
        answer = await self.run(
            "rev-list", "--max-count=1", commit,
            # --exclude applies to the next --all
            "--not", f"--exclude={OURS}*", "--exclude=refs/replace/*", "--all",
            doing=f"find refs that reach a commit of {self.name}",
        )  # fmt: skip
        return not answer.lines

    async def reaches(self, tips: Iterable[str], commits: Iterable[str]) -> bool:
        """True if all commits are among the tips and their ancestors."""
        answer = await self.run(
            "rev-list", "--max-count=1", "--stdin",
            stdin=lines_of([*commits, *(f"^{oid}" for oid in sorted(set(tips)))]),
            doing=f"find refs that reach commits of {self.name}",
        )  # fmt: skip
        return not answer.lines

    async def write_object(self, kind: str, content: bytes) -> str:
        """Write a loose object, flushed; return its id."""
        with full_disk_named(f"mirror {self.name}"):
            return await to_thread.run_sync(write_loose, self.objects, kind, content)

    async def pack_refs(self) -> None:
        """Pack loose refs: 50,000 of them cost every fetch a second."""
        await self.run("pack-refs", "--all", doing=f"pack refs of mirror {self.name}")

    async def verify_closure(self, commits: Iterable[str], proven: Iterable[str] = ()) -> None:
        """Prove that everything reachable from `commits`, but not from `proven`, is present.

        Raises CorruptObjectError or GitFailedError. Reads no commit-graph, with which git (2.39)
        does not notice a deleted commit.
        """
        await self.run(
            "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", "--stdin",
            stdin=lines_of([*commits, *(f"^{oid}" for oid in sorted(proven))]),
            doing=f"verify the closure in mirror {self.name}",
        )  # fmt: skip


def read_refs_of(git_dir: Path) -> Refs | None:
    """Read every ref without git; None where git has to judge them, or cannot use the mirror."""
    is_sound = not _find_fault(git_dir) and read_head(git_dir)
    return read_refs(git_dir) if is_sound else None


def _find_fault(git_dir: Path) -> str | None:
    kinds = {"objects": Path.is_dir, "refs": Path.is_dir, "HEAD": Path.is_file}
    for name, is_right in kinds.items():
        if not is_right(git_dir / name):
            return f"its {name} is missing or of the wrong type"
    changed = changed_settings(git_dir / "config")
    return f"its configuration was changed: {changed}" if changed else None


# the whole configuration of every mirror; much of it protects from git run by hand
CONFIGURATION = """\
[core]
	repositoryformatversion = 0
	filemode = true
	bare = true
	logAllRefUpdates = false
	useReplaceRefs = false
[gc]
	auto = 0
	pruneExpire = never
[maintenance]
	auto = false
[transfer]
	hideRefs = refs/mirrord
"""


def changed_settings(config: Path) -> str:
    """Describe how a configuration differs from CONFIGURATION; empty where it does not.

    Does not follow includes: an include is a difference.
    """
    try:
        text = decode_name(read_plain(config))
    except FileNotFoundError:
        return "it is lost"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if text == CONFIGURATION:
        return ""
    wanted, present = (Counter(map(str.strip, body.splitlines())) for body in (CONFIGURATION, text))
    changes = [f"it lacks {line}" for line in wanted - present]
    changes += [f"{legible(line[:100])} is not ours" for line in present - wanted]
    more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
    return ", ".join(changes[:3]) + more or "its lines are in another order"


# -- HEAD and refs read from their files, without git ----------------------------------------------
#
# Anything unusual is left for git to judge.

_NAME = r"refs/[^\x00-\x20\x7f~^:?*\[\\]+"
_HEAD = re.compile(rf"ref: ({_NAME})\n")
_VALUE = re.compile(r"(?!0{40})([0-9a-f]{40})\n")
_PACKED = re.compile(rf"([0-9a-f]{{40}}) ({_NAME})\n(?:\^[0-9a-f]{{40}}\n)?")
_PACKED_HEADER = re.compile(r"(?:# pack-refs with:[^\n]*\n)?")
# with the character class of _NAME, what git check-ref-format refuses
_NEVER_IN_NAMES = ("..", "@{", "//", "/.", ".\n", "/\n", ".lock\n", ".lock/")


def read_head(git_dir: Path) -> str | None:
    """Read the ref that HEAD names, which may not exist; None where git has to judge."""
    try:
        match = _HEAD.fullmatch(_read(git_dir / "HEAD"))
    except (OSError, ValueError):
        return None
    return match[1] if match else None


def read_refs(git_dir: Path) -> dict[str, str] | None:
    """Read every ref, sorted by name; None where git has to judge."""
    try:
        # loose refs first, because packing moves refs the other way
        loose = dict(_loose_refs(git_dir / "refs", "refs"))
        try:
            text = _read(git_dir / "packed-refs")
        except FileNotFoundError:
            text = ""
    except (OSError, ValueError):
        return None
    header = _PACKED_HEADER.match(text)
    packed = {ref: oid for oid, ref in _PACKED.findall(text)}
    # every byte is accounted for; 42 are an id, a blank or `^`, and a newline
    matched = sum(map(len, packed)) + 42 * (len(packed) + text.count("\n^"))
    names = text + "".join(f"{ref}\n" for ref in loose)
    is_plain = header and header.end() + matched == len(text)
    if not is_plain or any(part in names for part in _NEVER_IN_NAMES):
        return None
    refs = packed | loose
    return {ref: refs[ref] for ref in sorted(refs, key=encode_name)}


def _loose_refs(directory: Path | str, above: str) -> Iterator[tuple[str, str]]:
    with os.scandir(directory) as listing:
        entries = list(listing)
    for entry in entries:
        ref = f"{above}/{entry.name}"
        if entry.name.startswith(".") or entry.name.endswith(".lock"):
            continue  # as git does
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _loose_refs(entry.path, ref)
            elif value := _VALUE.fullmatch(_read(entry.path)):
                yield ref, value[1]
            else:
                raise ValueError(ref)
        except FileNotFoundError:  # packed or deleted meanwhile
            continue


def _read(path: Path | str) -> str:
    """Read a plain file; raises ValueError for anything else, because a pipe would block."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with opened(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(path)
        content = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    return decode_name(content)
