"""Which wanted tips a damaged object of an upstream stops: those whose history it is in.

A fetch that fails names the first object that stopped it. Commits and trees are a small part of a repository, and an upstream
gives them without reading a file's content (`--filter=blob:none`); with them it is known which tips reach that object, so that
all others can be asked for in one step. What is fetched here is unchecked, only read, and never gets into a mirror. An upstream
that knows no filters sends everything or fails again; then nothing is known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from ..git.batch import object_info
from .repository import Repository
from .upstream import Upstream

_SHALLOW = "cut"
BLOBLESS, TREELESS = "blob:none", "tree:0"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The commits that `tips` reach and the mirror lacks, in `objects`, as (commit, tree, parents…), the oldest first."""

    repository: Repository
    objects: Path
    commits: dict[str, str]
    history: list[list[str]]
    has_trees: bool

    async def reaching(self, oids: Collection[str]) -> set[str]:
        """The tips that reach any of these objects."""
        seeds = set(oids)
        unknown = seeds.difference(self.commits, *self.history) if self.has_trees else set()
        if unknown:
            seeds |= await self._commits_with(unknown)
        return await anyio.to_thread.run_sync(self._descendants, seeds)

    def sort(self, tips: Collection[str]) -> list[str]:
        """Tips whose history is part of another's come before it."""
        position = {oid: number for number, (oid, *_) in enumerate(self.history)}
        return sorted(tips, key=lambda tip: position.get(self.commits.get(tip) or tip, -1))

    async def _commits_with(self, oids: Collection[str]) -> set[str]:
        """The commits that brought a tree or a file with one of these ids, or took it away: both reach it."""
        found = await self.repository.git.run(
            "log", "--format=%H", "--no-patch", "-m", "-t", "--no-renames", *(f"--find-object={oid}" for oid in sorted(oids)),
            "--stdin", "--not", "--all",
            git_dir=self.repository.path,
            stdin="".join(f"{oid}\n" for oid in self.commits.values()).encode(),
            quarantine_objects=self.objects,
            env=shallow_at(self.objects),
            doing="look for the commits that reach a damaged object",
        )  # fmt: skip
        return set(found.lines)

    def _descendants(self, seeds: set[str]) -> set[str]:
        reached = set(seeds)
        for oid, tree, *parents in self.history:
            if tree in seeds or not reached.isdisjoint(parents):
                reached.add(oid)
        return {tip for tip, commit in self.commits.items() if tip in reached or commit in reached}


async def read_lineage(
    repository: Repository, tips: Sequence[str], objects: Path, kind: str
) -> Lineage:
    """Read what a fetch with the filter `kind` brought into `objects`."""
    peeled = await object_info(
        repository.git,
        repository.path,
        [f"{oid}^{{commit}}" for oid in tips],
        quarantine_objects=objects,
        doing="look up the commits of an upstream",
    )
    commits = {tip: found.oid for tip, found in zip(tips, peeled, strict=True) if found.exists}
    listing = await repository.git.run(
        "rev-list", "--format=%H %T %P", "--no-commit-header", "--topo-order", "--reverse", "--stdin", "--not", "--all",
        git_dir=repository.path,
        stdin="".join(f"{oid}\n" for oid in commits.values()).encode(),
        quarantine_objects=objects,
        env=shallow_at(objects),
        doing="list the commits of an upstream",
    )  # fmt: skip
    history = await anyio.to_thread.run_sync(lambda: [line.split() for line in listing.lines])
    return Lineage(repository, objects, commits, history, has_trees=kind == BLOBLESS)


def cut_at(objects: Path, commits: Collection[str]) -> None:
    """Have the fetches into `objects` tell upstream that history ends at these commits: it does not look for their parents."""
    with (objects / _SHALLOW).open("a", encoding="ascii") as file:
        file.writelines(f"{oid}\n" for oid in commits)


def shallow_at(objects: Path) -> dict[str, str]:
    return {"GIT_SHALLOW_FILE": str(objects / _SHALLOW)} if (objects / _SHALLOW).exists() else {}


def filtering(upstream: Upstream, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The configuration and the options of a fetch from the remote `upstream` that takes only what the filter lets through.

    The remote is a promisor from the start: else git (2.39) writes that into the mirror's configuration.
    """
    config = {
        "remote.upstream.url": upstream.remote.url,
        "remote.upstream.promisor": "true",
        "remote.upstream.partialCloneFilter": kind,
        "fetch.fsckObjects": "false",
    }
    # an upstream on this machine knows filters where its own configuration says so, or the command that serves it
    allowing = (
        ("--upload-pack", "git -c uploadpack.allowFilter=true upload-pack")
        if upstream.is_local
        else ()
    )
    return tuple(part for key, value in config.items() for part in ("-c", f"{key}={value}")), (
        f"--filter={kind}",
        *allowing,
    )
