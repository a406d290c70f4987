"""One mirror on disk, as the rest of this package sees it: a few questions to git about refs and objects.

Owns the namespace `refs/mirrord/`. Never takes a lock and never decides anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio

from ..errors import DamagedMirrorError
from ..git.batch import object_info
from ..git.command import Git
from ..host.files import sync_file, sync_tree
from ..model import MirrorName

OURS = "refs/mirrord/"
HISTORY = "refs/mirrord/history"
KEPT = "refs/mirrord/kept/"
PINS = "refs/mirrord/pins/"

Refs = dict[str, str]
"""Full ref name to object id."""

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
"""The whole configuration of every mirror: what git needs, and protection from git run by hand."""

_SECTION = re.compile(r"\[([A-Za-z]+)\]")
_ENTRY = re.compile(r"\t([A-Za-z]+) = ([\w./-]+)")


@dataclass(frozen=True, slots=True)
class Repository:
    """A bare repository at `path`, which may be one that is still being built in quarantine."""

    git: Git
    name: MirrorName
    path: Path

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    def is_stub(self) -> bool:
        """Whether a directory is there of which nothing can be read or saved: no ref, no pack, no HEAD."""
        known = (
            "HEAD",
            "packed-refs",
            "refs/*/**/*",
            "worktrees/*",
            "*/[0-9a-f][0-9a-f]/*",
            "**/pack-*",
        )
        return self.path.is_dir() and not any(
            next(self.path.glob(pattern), None) for pattern in known
        )

    async def create(self) -> None:
        """Make an empty repository at `path`."""
        doing = f"create mirror {self.name}"
        await self.git.run(
            "init", "--quiet", "--bare", "--object-format=sha1", str(self.path), doing=doing
        )
        await anyio.to_thread.run_sync(_configure, self.path)

    async def must_be_ours(self) -> None:
        """Refuse to change a mirror that git cannot open, or opens as something else; raises
        DamagedMirrorError.

        `extensions.objectFormat = sha256` alone makes git (2.39) see no tag, and a sync would
        drop them all; a promisor remote makes it accept holes.
        """
        if fact := await anyio.to_thread.run_sync(_why_not_ours, self.path):
            raise DamagedMirrorError(
                f"cannot use mirror {self.name}: {fact}",
                hint=f"`mirrord heal {self.name}` repairs it",
            )

    async def all_refs(self) -> Refs:
        """Every ref, ours included."""
        listing = await self.git.run(
            "for-each-ref",
            "--format=%(objectname) %(refname)",
            git_dir=self.path,
            doing=f"list refs of mirror {self.name}",
        )
        return {ref: oid for oid, _, ref in (line.partition(" ") for line in listing.lines)}

    async def head(self) -> str | None:
        """The ref that HEAD names."""
        found = await self.git.run(
            "symbolic-ref",
            "--quiet",
            "HEAD",
            git_dir=self.path,
            ok=(0, 1),
            doing=f"read HEAD of mirror {self.name}",
        )
        return found.lines[0] if found.lines else None

    async def set_head(self, ref: str) -> None:
        await self.git.run(
            "symbolic-ref", "HEAD", ref, git_dir=self.path, doing=f"set HEAD of mirror {self.name}"
        )
        await anyio.to_thread.run_sync(
            sync_file, self.path / "HEAD"
        )  # git does not flush it: a power cut would leave it empty

    async def absent(self, oids: Iterable[str]) -> set[str]:
        """Which of `oids` are not in the object store at all. Says nothing of their closures."""
        wanted = sorted(set(oids))
        doing = f"look up objects of mirror {self.name}"
        found = await object_info(self.git, self.path, wanted, doing=doing)
        return {each.name for each in found if each.kind == "missing"}

    async def commits_of(self, oids: Iterable[str]) -> set[str]:
        """The commits that the objects are, or as tags lead to."""
        peeled = [f"{oid}^{{commit}}" for oid in sorted(set(oids))]
        doing = f"look up commits of mirror {self.name}"
        found = await object_info(self.git, self.path, peeled, doing=doing)
        return {each.oid for each in found if each.exists}

    async def is_ancestor(self, old: str, new: str) -> bool:
        """True when a ref that moved from `old` to `new` lost nothing. False for anything but commits."""
        answer = await self.git.run(
            "merge-base",
            "--is-ancestor",
            old,
            new,
            git_dir=self.path,
            ok=(0, 1, 128),
            doing=f"compare commits of {self.name}",
        )
        return answer.status == 0

    async def is_public(self, commit: str) -> bool:
        """Whether a ref that follows upstream reaches the commit."""
        answer = await self.git.run(
            "rev-list", "--max-count=1", commit,
            "--not", f"--exclude={OURS}*", "--exclude=refs/replace/*", "--all",
            git_dir=self.path,
            doing=f"look for what reaches a commit of {self.name}",
        )  # fmt: skip
        return not answer.lines

    async def write_object(self, kind: str, content: bytes) -> str:
        """Write a loose object, flushed. `git mktree` (2.39) reads no configuration, so it flushes nothing."""
        doing = f"write into mirror {self.name}"
        made = await self.git.run(
            "hash-object",
            "-w",
            "-t",
            kind,
            "--stdin",
            git_dir=self.path,
            stdin=content,
            doing=doing,
        )
        return made.lines[0]

    async def pack_refs(self) -> None:
        """Loose refs cost a file each, and a second per 50,000 in every fetch."""
        await self.git.run(
            "pack-refs", "--all", git_dir=self.path, doing=f"pack refs of mirror {self.name}"
        )

    async def verify_closure(self, commits: Iterable[str]) -> None:
        """Prove that everything reachable from all of `commits` is present; raises CorruptObjectError or GitFailedError.

        Without the commit-graph: with it, git does not notice a deleted commit (2.39).
        """
        await self.git.run(
            "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", "--stdin",
            git_dir=self.path,
            stdin="".join(f"{commit}\n" for commit in commits).encode("ascii"),
            doing=f"verify the closure in mirror {self.name}",
        )  # fmt: skip


def _configure(path: Path) -> None:
    """Write CONFIGURATION, and flush all: git (2.39) flushes neither that nor HEAD."""
    (path / "config").write_text(CONFIGURATION, encoding="ascii")
    sync_tree(path)


def _why_not_ours(path: Path) -> str | None:
    for name, is_right in (("objects", Path.is_dir), ("refs", Path.is_dir), ("HEAD", Path.is_file)):
        if not is_right(path / name):
            return f"its {name} is lost, or something else"
    changed = changed_settings(path / "config")
    return f"its configuration was changed: {changed[0]}" if changed else None


def changed_settings(config: Path) -> list[str]:
    """How a configuration differs from CONFIGURATION, one phrase for each setting; none where it
    does not. Includes are not followed: one is a difference.
    """
    try:
        text = config.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ["it is lost"]
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    if text == CONFIGURATION:
        return []
    there, wanted = _settings(text), _settings(CONFIGURATION)
    lacking = [f"it lacks {setting}" for setting in wanted if setting not in there]
    return lacking + [
        f"{ascii(setting)[1:-1]} is not ours"
        for setting in there
        if there.count(setting) > wanted.count(setting)
    ]


def _settings(text: str) -> list[str]:
    """`section.key=value` for each line that git writes for us; any other line as it stands."""
    settings: list[str] = []
    section = ""
    for line in text.splitlines():
        if head := _SECTION.fullmatch(line):
            section = head[1].lower()
        elif section and (entry := _ENTRY.fullmatch(line)):
            settings.append(f"{section}.{entry[1].lower()}={entry[2]}")
        else:
            section = ""  # whatever follows belongs to a section that is not ours
            settings.append(line.strip()[:100])
    return settings
