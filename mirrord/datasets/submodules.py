"""Submodules of base commits: their mirrors, their pins, and the composed trees.

As git does, a URL is relative to that of the repository that names it. What a `.gitmodules` says is
upstream's word: each submodule that is refused, or that cannot be had, is named with the reason,
and stays an empty directory.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..catalog import ALL_COMMITS, Composition, Module
from ..errors import MirrordError
from ..git.objects.modules import Link, Needs, Part, compose, read_needs
from ..host.trash import remove_tree
from ..mirrors.service import Mirrors
from ..mirrors.upstream import parse_upstream
from ..model import CommitId, CommitRole, DatasetName, MirrorName
from ..places import whole_path
from ..protocol import ProgressSink
from ..telemetry import log, mask_url
from .pinning import PinOutcome, pin_all

DEPTH_LIMIT = 8
"""Submodules within submodules."""
COUNT_LIMIT = 200
"""Submodules of one commit, those within others included."""
_NAME = re.compile(r"(?!-|/)(?!.*(?:^|/)\.{0,2}(?:/|$))(?!.*\.git(?:/|$))[^\x00-\x1f\\:]{1,200}")
_TIMEOUT = timedelta(minutes=30)
Key = tuple[str, CommitId]
"""The key of a mirror, and a base commit."""


class _Wanted(NamedTuple):
    """A submodule to have: from where, and where it stands in the tree of a base commit."""

    base: Key
    link: Link
    path: str
    git_dir: str
    url: str
    mirror: MirrorName
    own_url: str | None


async def compose_all(
    mirrors: Mirrors,
    dataset: DatasetName,
    bases: Mapping[str, Collection[CommitId]],
    wholes: Path,
    sink: ProgressSink | None,
) -> dict[Key, Composition]:
    """Return what each base commit of these mirrors needs, and write the composed trees.

    Mirrors of submodules are added and synced, their commits pinned for the dataset.
    """
    found: dict[Key, Composition] = {}
    level: list[tuple[Key, str, str, MirrorName, Needs]] = []
    rows = {row.name.key: row for row in await mirrors.catalog.list_mirrors()}
    for key, commits in bases.items():
        if key not in rows or not commits:
            continue
        read = await _read(mirrors, rows[key].name, commits)
        for commit, each in read.items():
            sizes = [size for _, size in each.pointers]
            found[key, commit] = Composition(pointers=len(sizes), lfs_bytes=sum(sizes))
            if each.links:
                level.append(((key, commit), "", "", rows[key].name, each))
    if mirrors.settings().datasets.submodules:
        trees = {base: needs.tree for base, _, _, _, needs in level}
        await _descend(mirrors, dataset, level, found, sink)
        await _compose(mirrors, found, trees, wholes)
    else:
        for base, _, _, _, needs in level:
            fact = "[datasets] submodules is false"
            missing = tuple((link.path, fact) for link in needs.links)
            found[base] = replace(found[base], missing=missing)
    return found


async def _read(
    mirrors: Mirrors, name: MirrorName, commits: Collection[CommitId]
) -> dict[CommitId, Needs]:
    path, run = mirrors.path(name), mirrors.workers.run
    try:
        found = await run(read_needs, path, sorted(commits), timeout=_TIMEOUT)
    except MirrordError as error:
        log.warning("needs.unread", mirror=str(name), error=error.message)
        return {}
    return {CommitId(commit): each for commit, each in found.items()}


async def _descend(
    mirrors: Mirrors,
    dataset: DatasetName,
    level: list[tuple[Key, str, str, MirrorName, Needs]],
    found: dict[Key, Composition],
    sink: ProgressSink | None,
) -> None:
    """Have the submodules of each level, and then those within them."""
    for depth in range(DEPTH_LIMIT + 1):
        wanted = list[_Wanted]()
        for base, above, git_dir, parent, needs in level:
            url = (await mirrors.get(str(parent))).url
            for link in needs.links:
                path = f"{above}/{link.path}" if above else link.path
                composition = found[base]
                count = len(composition.modules) + sum(each.base == base for each in wanted)
                try:
                    if depth == DEPTH_LIMIT or count >= COUNT_LIMIT:
                        raise ValueError(
                            f"submodules are followed {DEPTH_LIMIT} deep, {COUNT_LIMIT} of a commit"
                        )
                    wanted.append(_resolve(mirrors, base, link, path, git_dir, url))
                except ValueError as error:
                    missing = (*composition.missing, (path, str(error)))
                    found[base] = replace(composition, missing=missing)
        if not wanted:
            return
        level = await _have(mirrors, dataset, wanted, found, sink)


def _resolve(
    mirrors: Mirrors, base: Key, link: Link, path: str, above: str, parent_url: str
) -> _Wanted:
    """Return from where a submodule is had; ValueError says why it is refused."""
    if link.name is None or not link.url:
        raise ValueError("no entry of .gitmodules has this path and a URL")
    if not _NAME.fullmatch(link.name):
        raise ValueError("its name in .gitmodules is refused")
    url = join_url(parent_url, link.url)
    try:
        upstream, parent = parse_upstream(url), parse_upstream(parent_url)
    except MirrordError as error:
        raise ValueError(f"its URL is refused: {error.message.partition(': ')[2]}") from error
    if upstream.is_local and not parent.is_local:
        raise ValueError("its URL is local and that of its parent is not")
    parts = [part for part in re.split(r"[/:]", url.rstrip("/").removesuffix(".git")) if part]
    try:
        name = MirrorName.parse("/".join(parts[-2:]))
    except MirrordError as error:
        raise ValueError(f"its URL {mask_url(url)} does not end in owner/name") from error
    # what a template serves is had as the data sets' own repositories are
    template = mirrors.settings().upstream.url
    is_usual = upstream.host in ("github.com", urlsplit(template).hostname)
    own_url = None if is_usual and not upstream.is_local else url
    git_dir = f"{above}/modules/{link.name}" if above else f"modules/{link.name}"
    return _Wanted(base, link, path, git_dir, link.url, name, own_url)


def join_url(parent: str, url: str) -> str:
    """Return the URL that git's `relative_url` makes of one beside `parent`."""
    if not url.startswith(("./", "../")):
        return url
    at = parent.rstrip("/")
    while True:
        if url.startswith("../"):
            url = url.removeprefix("../")
            above, slash, _ = at.rpartition("/")
            at = above if slash else at.rpartition(":")[0]
        elif url.startswith("./"):
            url = url.removeprefix("./")
        else:
            return f"{at}/{url}".rstrip("/")


async def _have(
    mirrors: Mirrors,
    dataset: DatasetName,
    wanted: Sequence[_Wanted],
    found: dict[Key, Composition],
    sink: ProgressSink | None,
) -> list[tuple[Key, str, str, MirrorName, Needs]]:
    """Mirror and pin submodules; return those that have submodules themselves."""
    names: dict[str, MirrorName] = {}
    commits: dict[str, dict[CommitId, str]] = {}
    outcomes: dict[str, PinOutcome] = {}
    new: list[MirrorName] = []
    for each in wanted:
        key = each.mirror.key
        if key not in names and key not in outcomes:
            try:
                row = await mirrors.catalog.find_mirror(key)
                if row is None:
                    row = await mirrors.add(each.mirror.repo, each.own_url)
                    new.append(row.name)
                names[key] = row.name
            except MirrordError as error:
                outcomes[key] = PinOutcome({ALL_COMMITS: error.message}, {})
        commits.setdefault(key, {})[CommitId(each.link.commit)] = CommitRole.SUBMODULE
    commits = {key: commits[key] for key in names}
    outcomes |= await pin_all(mirrors, dataset, names, commits, {}, sink)
    for name in new:  # what cannot be had is asked for by the next import, not by each sync
        if (await mirrors.get(str(name))).synced_at is None:
            await mirrors.remove(name)
            del names[name.key]
    had = {key: {c for c in commits[key] if not _refusal(outcomes[key], c)} for key in names}
    needs = {key: await _read(mirrors, names[key], had[key]) for key in names}
    below = []
    for each in wanted:
        key, commit, composition = each.mirror.key, CommitId(each.link.commit), found[each.base]
        reason = _refusal(outcomes[key], commit)
        inner = needs.get(key, {}).get(commit)
        if reason or inner is None:
            fact = (each.path, f"{each.mirror.repo}: {reason or 'its tree cannot be read'}")
            found[each.base] = replace(composition, missing=(*composition.missing, fact))
            continue
        module = Module(
            each.path, str(each.link.name), each.git_dir, each.url, str(names[key]), commit
        )
        found[each.base] = replace(composition, modules=(*composition.modules, module))
        if inner.links:
            below.append((each.base, each.path, each.git_dir, names[key], inner))
    return below


def _refusal(outcome: PinOutcome, commit: CommitId) -> str | None:
    return outcome.refused.get(commit) or outcome.refused.get(ALL_COMMITS)


async def _compose(
    mirrors: Mirrors, found: dict[Key, Composition], trees: Mapping[Key, str], wholes: Path
) -> None:
    """Write the composed trees that an earlier import did not write."""
    names = {row.name.key: row.name for row in await mirrors.catalog.list_mirrors()}
    known: dict[str, dict[CommitId, Composition]] = {}
    jobs: dict[Key, tuple[Path, Path, str, list[Part]]] = {}
    for base, composition in found.items():
        if not composition.modules:
            continue
        key, commit = base
        target = whole_path(wholes, str(names[key]), commit)
        if key not in known:
            known[key] = await mirrors.catalog.list_compositions(key)
        before = known[key].get(commit)
        if before and before.modules == composition.modules and target.exists():
            found[base] = replace(composition, tree=before.tree)
            continue
        parts = [
            Part(each.path, mirrors.path(MirrorName.parse(each.mirror)), each.commit)
            for each in composition.modules
        ]
        jobs[base] = target, mirrors.path(names[key]), trees[base], parts
    if jobs:
        run = mirrors.workers.run
        written = await run(put_wholes, list(jobs.values()), timeout=_TIMEOUT)
        for base, tree in zip(jobs, written, strict=True):
            found[base] = replace(found[base], tree=tree)


def put_wholes(jobs: Sequence[tuple[Path, Path, str, list[Part]]]) -> list[str]:
    """Write composed trees, each given as the arguments of `put_whole`; return their ids."""
    return [put_whole(*job) for job in jobs]


def put_whole(target: Path, mirror: Path, tree: str, parts: list[Part]) -> str:
    """Write the repository anew, and rename it into place."""
    new = target.with_suffix(".new")
    for path in (new, target):
        remove_tree(path)
    new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = compose(new, mirror, tree, parts)
    new.rename(target)
    return whole
