"""Submodules and LFS objects of base commits: had, pinned, and put into the composed trees.

As git does, a URL is relative to that of the repository that names it. What a `.gitmodules` says is
upstream's word: each submodule that is refused, or that cannot be had, is named with the reason,
and stays an empty directory.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..catalog import ALL_COMMITS, Composition, Module
from ..errors import MirrordError
from ..git.lfs import Pointer, has_object
from ..git.objects.modules import Link, Needs, Part, Whole, compose, read_needs
from ..mirrors.lfs import fetch_objects
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import parse_upstream
from ..model import CommitId, CommitRole, DatasetName, MirrorName
from ..places import whole_path
from ..protocol import ProgressSink
from ..telemetry import log, mask_url
from .pinning import PinOutcome, pin_all

DEPTH_LIMIT = 8
"""Submodules within submodules."""
COUNT_LIMIT = 200
"""Submodules of one commit, those within others included."""
# it becomes a path below .git/modules
_NAME = re.compile(r"(?!-|/)(?!.*(?:^|/)\.{0,2}(?:/|$))(?!.*\.git(?:/|$))[^\x00-\x1f\\:]{1,200}")
_TIMEOUT = timedelta(minutes=30)
_ABSENT = "it is not here, and an import of the data set would ask for it"
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


class Composed(NamedTuple):
    """What each base commit needs. `changed` are the keys of mirrors whose trees have other files
    than before; `lfs_reasons` say why LFS objects are not had.
    """

    found: dict[Key, Composition]
    changed: frozenset[str] = frozenset()
    lfs_reasons: tuple[str, ...] = ()


async def compose_all(
    mirrors: Mirrors,
    dataset: DatasetName,
    bases: Mapping[str, Collection[CommitId]],
    templates: Path,
    sink: ProgressSink | None,
    *,
    asks: bool = True,
) -> Composed:
    """Return what each base commit of these mirrors needs, and write the composed trees.

    Mirrors of submodules are added and synced, their commits pinned for the dataset. Without `asks`
    no upstream is asked: what is not here is missing.
    """
    compositions: dict[Key, Composition] = {}
    all_needs: dict[Key, Needs] = {}
    level: list[tuple[Key, str, str, MirrorName, Needs]] = []
    rows = {row.name.key: row for row in await mirrors.catalog.list_mirrors()}
    for key, commits in bases.items():
        if key not in rows or not commits:
            continue
        read = await _read(mirrors, rows[key].name, commits)
        for commit, needs in read.items():
            compositions[key, commit] = Composition()
            all_needs[key, commit] = needs
            if needs.links:
                level.append(((key, commit), "", "", rows[key].name, needs))
    if mirrors.settings().datasets.submodules:
        await _descend(mirrors, dataset, level, compositions, all_needs, sink, asks=asks)
    else:
        for base, _, _, _, needs in level:
            fact = "[datasets] submodules is false"
            missing = tuple((link.path, fact) for link in needs.links)
            compositions[base] = replace(compositions[base], missing=missing)
    reasons = await _have_objects(mirrors, compositions, all_needs, sink, asks=asks)
    changed = await _compose(mirrors, compositions, templates)
    return Composed(compositions, changed, tuple(sorted(set(reasons))))


async def _have_objects(
    mirrors: Mirrors,
    compositions: dict[Key, Composition],
    needs: Mapping[Key, Needs],
    sink: ProgressSink | None,
    *,
    asks: bool,
) -> list[str]:
    """Fetch the LFS objects of these commits, and count them; return why some are not had."""
    wanted: dict[str, dict[Pointer, str | None]] = {}
    for (key, _), need in needs.items():
        if need.pointers:
            wanted.setdefault(key, {}).update(dict.fromkeys(need.objects, need.lfs_url))
    if not wanted:
        return []
    rows = {row.name.key: row for row in await mirrors.catalog.list_mirrors()}
    reasons = list[str]()
    lacking: dict[str, set[Pointer]] = {}
    for key, pointers in wanted.items():
        git_dir = mirrors.path(rows[key].name)
        lacking[key] = {pointer for pointer in pointers if not has_object(git_dir, pointer)}
        if not asks:
            reasons += [_ABSENT] if lacking[key] else []
        elif mirrors.settings().datasets.lfs:
            reasons += (await fetch_objects(mirrors, rows[key], pointers.items(), sink)).values()
            lacking[key] = {pointer for pointer in lacking[key] if not has_object(git_dir, pointer)}
        elif lacking[key]:
            reasons.append("[datasets] lfs is false")
    for base, composition in compositions.items():
        parts = [base, *((sub.mirror.lower(), CommitId(sub.commit)) for sub in composition.modules)]
        objects = {
            (key, pointer) for key, commit in parts for pointer in needs[key, commit].objects
        }
        if objects:
            compositions[base] = replace(
                composition,
                pointers=len(objects),
                lfs_bytes=sum(pointer.size for _, pointer in objects),
                lfs_missing=sum(pointer in lacking[key] for key, pointer in objects),
            )
    return reasons


async def _read(
    mirrors: Mirrors, name: MirrorName, commits: Collection[CommitId]
) -> dict[CommitId, Needs]:
    path, run = mirrors.path(name), mirrors.workers.run
    try:
        by_commit = await run(read_needs, path, sorted(commits), timeout=_TIMEOUT)
    except MirrordError as error:
        log.warning("needs.unread", mirror=str(name), error=error.message)
        return {}
    return {CommitId(commit): needs for commit, needs in by_commit.items()}


async def _descend(
    mirrors: Mirrors,
    dataset: DatasetName,
    level: list[tuple[Key, str, str, MirrorName, Needs]],
    compositions: dict[Key, Composition],
    all_needs: dict[Key, Needs],
    sink: ProgressSink | None,
    *,
    asks: bool,
) -> None:
    """Have the submodules of each level, and then those within them."""
    # once more than is had: at the last depth each one is named as missing
    for depth in range(DEPTH_LIMIT + 1):
        wanted = list[_Wanted]()
        for base, above, git_dir, parent, needs in level:
            url = (await mirrors.get(str(parent))).url
            for link in needs.links:
                path = f"{above}/{link.path}" if above else link.path
                composition = compositions[base]
                count = len(composition.modules) + sum(want.base == base for want in wanted)
                try:
                    if depth == DEPTH_LIMIT or count >= COUNT_LIMIT:
                        raise ValueError(
                            f"submodules are followed {DEPTH_LIMIT} deep, {COUNT_LIMIT} of a commit"
                        )
                    wanted.append(_resolve(mirrors, base, link, path, git_dir, url))
                except ValueError as error:
                    missing = (*composition.missing, (path, str(error)))
                    compositions[base] = replace(composition, missing=missing)
        if not wanted:
            return
        level = await _have(mirrors, dataset, wanted, compositions, all_needs, sink, asks=asks)


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
    # else an upstream could have this host's own repositories read
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
    base = parent.rstrip("/")
    while True:
        if url.startswith("../"):
            url = url.removeprefix("../")
            above, slash, _ = base.rpartition("/")
            base = above if slash else base.rpartition(":")[0]
        elif url.startswith("./"):
            url = url.removeprefix("./")
        else:
            return f"{base}/{url}".rstrip("/")


async def _have(
    mirrors: Mirrors,
    dataset: DatasetName,
    wanted: Sequence[_Wanted],
    compositions: dict[Key, Composition],
    all_needs: dict[Key, Needs],
    sink: ProgressSink | None,
    *,
    asks: bool,
) -> list[tuple[Key, str, str, MirrorName, Needs]]:
    """Mirror and pin submodules; return those that have submodules themselves."""
    names: dict[str, MirrorName] = {}
    commits: dict[str, dict[CommitId, str]] = {}
    outcomes: dict[str, PinOutcome] = {}
    new: list[MirrorName] = []
    for want in wanted:
        key = want.mirror.key
        if key not in names and key not in outcomes:
            try:
                row = await mirrors.catalog.find_mirror(key)
                if row is None and not asks:
                    outcomes[key] = PinOutcome({ALL_COMMITS: _ABSENT}, {})
                    continue
                if row is None:
                    row = await mirrors.add(want.mirror.repo, want.own_url)
                    new.append(row.name)
                names[key] = row.name
            except MirrordError as error:
                outcomes[key] = PinOutcome({ALL_COMMITS: error.message}, {})
        commits.setdefault(key, {})[CommitId(want.link.commit)] = CommitRole.SUBMODULE
    commits = {key: commits[key] for key in names}
    absent: dict[str, dict[str, str]] = {}
    for key in () if asks else names:
        gone = await mirrors.repository(names[key]).absent(commits[key])
        absent[key] = dict.fromkeys(gone, _ABSENT)
        commits[key] = {commit: why for commit, why in commits[key].items() if commit not in gone}
    outcomes |= await pin_all(mirrors, dataset, names, commits, {}, sink)
    for key, gone_ones in absent.items():
        outcomes[key] = PinOutcome({**outcomes[key].refused, **gone_ones}, outcomes[key].found)
    for name in new:  # what cannot be had is asked for by the next import, not by each sync
        if (await mirrors.get(str(name))).synced_at is None:
            await mirrors.remove(name)
            del names[name.key]
    had = {key: {c for c in commits[key] if not _refusal(outcomes[key], c)} for key in names}
    for key, name in names.items():
        unread = [commit for commit in had[key] if (key, commit) not in all_needs]
        read = await _read(mirrors, name, unread) if unread else {}
        all_needs |= {(key, commit): needs for commit, needs in read.items()}
    below = []
    for want in wanted:
        key, commit = want.mirror.key, CommitId(want.link.commit)
        composition = compositions[want.base]
        reason = _refusal(outcomes[key], commit)
        inner = all_needs.get((key, commit))
        if reason or inner is None:
            fact = (want.path, f"{want.mirror.repo}: {reason or 'its tree cannot be read'}")
            compositions[want.base] = replace(composition, missing=(*composition.missing, fact))
            continue
        module = Module(
            want.path, str(want.link.name), want.git_dir, want.url, str(names[key]), commit
        )
        compositions[want.base] = replace(composition, modules=(*composition.modules, module))
        if inner.links:
            below.append((want.base, want.path, want.git_dir, names[key], inner))
    return below


def _refusal(outcome: PinOutcome, commit: CommitId) -> str | None:
    if outcome.found.get(commit, commit) != commit:
        return "upstream is shallow, and lacks the commit's parents"
    return outcome.refused.get(commit) or outcome.refused.get(ALL_COMMITS)


async def _compose(
    mirrors: Mirrors, compositions: dict[Key, Composition], templates: Path
) -> frozenset[str]:
    """Write the composed trees that an earlier import did not write.

    Returns the keys of the mirrors whose trees have other LFS objects than before.
    """
    names = {row.name.key: row.name for row in await mirrors.catalog.list_mirrors()}
    earlier: dict[str, dict[CommitId, Composition]] = {}
    jobs: dict[str, list[CommitId]] = {}
    for (key, commit), composition in compositions.items():
        if key not in earlier:
            earlier[key] = await mirrors.catalog.list_compositions(key)
        if not composition.modules and composition.lfs_missing == composition.pointers:
            continue
        before = earlier[key].get(commit)
        target = whole_path(templates, str(names[key]))
        if (
            before
            and before == replace(composition, tree=before.tree)
            and has_whole(target, before)
        ):
            compositions[key, commit] = replace(composition, tree=before.tree)
        else:
            jobs.setdefault(key, []).append(commit)
    run = mirrors.workers.run
    for key, commits in jobs.items():
        wholes = [
            whole_of(mirrors.path, names[key], commit, compositions[key, commit])
            for commit in commits
        ]
        target = whole_path(templates, str(names[key]))
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        trees = await run(compose, target, wholes, timeout=_TIMEOUT)
        for commit, tree in zip(commits, trees, strict=True):
            compositions[key, commit] = replace(compositions[key, commit], tree=tree)
    return frozenset(
        key
        for (key, commit), composition in compositions.items()
        if composition.lfs_missing != _missing_before(earlier[key].get(commit), composition)
    )


def _missing_before(before: Composition | None, now: Composition) -> int:
    return before.lfs_missing if before else now.pointers


def has_whole(target: Path, composition: Composition) -> bool:
    """Return whether a composed tree is in the repository at `target`."""
    tree = composition.tree
    return tree is not None and (target / "objects" / tree[:2] / tree[2:]).exists()


def whole_of(
    path_of: Callable[[MirrorName], Path],
    name: MirrorName,
    commit: CommitId,
    composition: Composition,
) -> Whole:
    parts = (
        Part(module.path, path_of(MirrorName.parse(module.mirror)), module.commit)
        for module in composition.modules
    )
    return Whole(path_of(name), commit, tuple(parts))
