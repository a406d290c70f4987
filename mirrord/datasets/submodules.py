"""Submodules and LFS objects of base commits: had, pinned, and put into the composed trees.

As git does, a URL is relative to that of the repository that names it. What a `.gitmodules` says is
upstream's word: each submodule that is refused, or that cannot be had, is named with the reason,
and stays an empty directory.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from ..catalog import ALL_COMMITS, Composition, Module
from ..errors import MirrordError
from ..git.lfs import Pointer, has_object, has_recorded
from ..git.objects.modules import Link, Needs, Part, Whole, compose, read_all_needs, read_needs
from ..jobs.operations import together
from ..mirrors.lfs import fetch_objects
from ..mirrors.service import Mirrors
from ..mirrors.upstreams.upstream import parse_upstream
from ..model import CommitId, CommitRole, DatasetName, MirrorName
from ..places import whole_path
from ..presence import exists
from ..protocol import ProgressSink
from ..telemetry import log, mask_url
from .pinning import PinOutcome, pin_all

# submodules within submodules
DEPTH_LIMIT = 8
# submodules of one commit, those within others included
COUNT_LIMIT = 200
# it becomes a path below .git/modules
_NAME = re.compile(r"(?!-|/)(?!.*(?:^|/)\.{0,2}(?:/|$))(?!.*\.git(?:/|$))[^\x00-\x1f\\:]{1,200}")
_TIMEOUT = timedelta(minutes=30)
_BATCH = 50  # mirrors that one call of a worker reads
_NOTHING = Composition()
_ABSENT = "it is not here, and an import of the data set would ask for it"
# the key of a mirror, and a base commit
Key = tuple[str, CommitId]


class _Wanted(NamedTuple):
    """A submodule to have: from where, and where it stands in the tree of a base commit."""

    base: Key
    link: Link
    path: str
    git_dir: str
    url: str
    mirror: MirrorName
    own_url: str | None

    @property
    def commit(self) -> CommitId:
        return CommitId(self.link.commit)


class _Parent(NamedTuple):
    """A commit with submodules: the base commit itself, or one below it, and where it stands."""

    base: Key
    path: str
    git_dir: str
    mirror: MirrorName
    needs: Needs


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
    composing = _Composing(mirrors, dataset, sink, asks)
    earlier = await mirrors.catalog.list_compositions(bases)
    standing = await composing.list_standing(bases, earlier, templates)
    left = {key: {it for it in bases[key] if (key, it) not in standing} for key in bases}
    parents = await composing.read_bases(left)
    if mirrors.settings().datasets.submodules:
        await composing.descend(parents)
    else:
        for parent in parents:
            for link in parent.needs.links:
                composing.miss(parent.base, link.path, "[datasets] submodules is false")
    reasons = await composing.have_objects()
    changed = await _compose(mirrors, composing.found, earlier, templates)
    return Composed(composing.found | standing, changed, tuple(sorted(set(reasons))))


@dataclass(slots=True)
class _Composing:
    """One composition: what was found of each base commit, what each commit read so far needs."""

    mirrors: Mirrors
    dataset: DatasetName
    sink: ProgressSink | None
    asks: bool
    found: dict[Key, Composition] = field(default_factory=dict)
    needs: dict[Key, Needs] = field(default_factory=dict)

    def miss(self, base: Key, path: str, reason: str) -> None:
        """Note that a submodule of a base commit is not had."""
        composition = self.found[base]
        missing = (*composition.missing, (path, reason))
        self.found[base] = replace(composition, missing=missing)

    async def list_standing(
        self,
        bases: Mapping[str, Collection[CommitId]],
        earlier: Mapping[Key, Composition],
        templates: Path,
    ) -> dict[Key, Composition]:
        """List what an earlier import had whole and what is still here; its modules are pinned.

        What a commit needs stays the same, so its tree is not read again; most need nothing.
        """
        if not self.asks or not self.mirrors.settings().datasets.submodules:
            return {}
        whole = {
            base: it for base, it in earlier.items()
            if base[1] in bases[base[0]] and not it.missing and not it.lfs_missing
        }  # fmt: skip
        plain = {base: it for base, it in whole.items() if it == _NOTHING}
        whole = {base: it for base, it in whole.items() if base not in plain}
        if not whole:
            return plain
        names = {row.name.key: row.name for row in await self.mirrors.catalog.list_mirrors()}
        parts = {
            base: {(it.mirror.lower(), CommitId(it.commit)) for it in composition.modules}
            for base, composition in whole.items()
        }
        keys = {base[0] for base in whole} | {key for part in parts.values() for key, _ in part}
        git_dirs = {key: self.mirrors.path(names[key]) for key in keys & names.keys()}
        had = await to_thread.run_sync(
            lambda: {key for key, git_dir in git_dirs.items() if has_recorded(git_dir)}
        )
        pins: dict[str, dict[CommitId, str]] = {}
        for key, commit in {part for base in whole for part in parts[base] if part[0] in had}:
            pins.setdefault(key, {})[commit] = CommitRole.SUBMODULE
        outcomes = await pin_all(
            self.mirrors, self.dataset, {key: names[key] for key in pins}, pins, {}, self.sink
        )
        targets = {key: whole_path(templates, str(names[key])) for key in had}
        return plain | {
            base: it
            for base, it in whole.items()
            if base[0] in had
            and all(key in had and not _refusal(outcomes[key], part) for key, part in parts[base])
            and has_whole(targets[base[0]], it)
        }

    async def read_bases(self, bases: Mapping[str, Collection[CommitId]]) -> list[_Parent]:
        """Read what base commits need; return those that have submodules."""
        rows = {row.name.key: row for row in await self.mirrors.catalog.list_mirrors()}
        keys = [key for key, commits in bases.items() if key in rows and commits]

        async def read(batch: Sequence[str]) -> None:
            wanted = [(self.mirrors.path(rows[key].name), sorted(bases[key])) for key in batch]
            try:
                answers = await self.mirrors.workers.run(read_all_needs, wanted, timeout=_TIMEOUT)
            except MirrordError:  # of one of them
                for key in batch:
                    await self._read(rows[key].name, bases[key])
            else:
                for key, needs_of in zip(batch, answers, strict=True):
                    self.needs |= {(key, CommitId(it)): needs for it, needs in needs_of.items()}

        await together(read(keys[first : first + _BATCH]) for first in range(0, len(keys), _BATCH))
        self.found |= {base: Composition() for base in self.needs}
        return [
            _Parent((key, commit), "", "", rows[key].name, needs)
            for (key, commit), needs in self.needs.items()
            if needs.links
        ]

    async def _read(self, name: MirrorName, commits: Collection[CommitId]) -> None:
        path, run = self.mirrors.path(name), self.mirrors.workers.run
        try:
            read = await run(read_needs, path, sorted(commits), timeout=_TIMEOUT)
        except MirrordError as error:
            log.warning("needs.unread", mirror=str(name), error=error.message)
        else:
            self.needs |= {(name.key, CommitId(commit)): needs for commit, needs in read.items()}

    async def have_objects(self) -> list[str]:
        """Fetch the LFS objects of all commits, and count them; return why some are not had."""
        mirrors = self.mirrors
        wanted: dict[str, dict[Pointer, str | None]] = {}
        for (key, _), needs in self.needs.items():
            if needs.pointers:
                wanted.setdefault(key, {}).update(dict.fromkeys(needs.objects, needs.lfs_url))
        if not wanted:
            return []
        rows = {row.name.key: row for row in await mirrors.catalog.list_mirrors()}
        reasons = list[str]()
        lacking: dict[str, set[Pointer]] = {}
        for key, pointers in wanted.items():
            git_dir = mirrors.path(rows[key].name)
            lacking[key] = {pointer for pointer in pointers if not has_object(git_dir, pointer)}
            if not self.asks:
                reasons += [_ABSENT] if lacking[key] else []
            elif mirrors.settings().datasets.lfs:
                failed = await fetch_objects(mirrors, rows[key], pointers.items(), self.sink)
                reasons += failed.values()
                lacking[key] = {it for it in lacking[key] if not has_object(git_dir, it)}
            elif lacking[key]:
                reasons.append("[datasets] lfs is false")
        for base, composition in self.found.items():
            inner = ((it.mirror.lower(), CommitId(it.commit)) for it in composition.modules)
            parts = [base, *inner]
            objects = {(key, it) for key, commit in parts for it in self.needs[key, commit].objects}
            if objects:
                self.found[base] = replace(
                    composition,
                    pointers=len(objects),
                    lfs_bytes=sum(pointer.size for _, pointer in objects),
                    lfs_missing=sum(pointer in lacking[key] for key, pointer in objects),
                )
        return reasons

    async def descend(self, parents: Sequence[_Parent]) -> None:
        """Have the submodules of these commits, and then those within them."""
        template = self.mirrors.settings().upstream.url
        # once more than is had: at the last depth each one is named as missing
        for depth in range(DEPTH_LIMIT + 1):
            wanted, counts = list[_Wanted](), Counter[Key]()
            mirrors = {parent.mirror.key: parent.mirror for parent in parents}
            urls = {key: (await self.mirrors.get(str(it))).url for key, it in mirrors.items()}
            for parent in parents:
                for link in parent.needs.links:
                    path = f"{parent.path}/{link.path}" if parent.path else link.path
                    count = len(self.found[parent.base].modules) + counts[parent.base]
                    try:
                        if depth == DEPTH_LIMIT or count >= COUNT_LIMIT:
                            raise ValueError(
                                f"submodules are followed {DEPTH_LIMIT} deep, {COUNT_LIMIT} of a"
                                " commit"
                            )
                        url = urls[parent.mirror.key]
                        wanted.append(_resolve(parent, link, path, url, template))
                        counts[parent.base] += 1
                    except ValueError as error:
                        self.miss(parent.base, path, str(error))
            if not wanted:
                return
            outcomes, names = await self._pin(wanted)
            parents = await self._take(wanted, outcomes, names)

    async def _pin(
        self, wanted: Sequence[_Wanted]
    ) -> tuple[dict[str, PinOutcome], dict[str, MirrorName]]:
        """Mirror and pin submodules; return the outcomes, and the mirrors that are had."""
        mirrors = self.mirrors
        outcomes: dict[str, PinOutcome] = {}
        names: dict[str, MirrorName] = {}
        new: list[MirrorName] = []
        firsts: dict[str, _Wanted] = {}
        for module in wanted:
            firsts.setdefault(module.mirror.key, module)
        for key, module in firsts.items():
            try:
                row = await mirrors.catalog.find_mirror(key)
                if row is None and self.asks:
                    row = await mirrors.add(module.mirror.repo, module.own_url)
                    new.append(row.name)
            except MirrordError as error:
                outcomes[key] = PinOutcome({ALL_COMMITS: error.message}, {})
                continue
            if row is None:
                outcomes[key] = PinOutcome({ALL_COMMITS: _ABSENT}, {})
            else:
                names[key] = row.name
        pins = {
            key: {it.commit: CommitRole.SUBMODULE for it in wanted if it.mirror.key == key}
            for key in names
        }
        absent: dict[str, Collection[str]] = {}
        for key, name in () if self.asks else names.items():
            absent[key] = await mirrors.repository(name).absent(pins[key])
            for commit in absent[key]:
                del pins[key][CommitId(commit)]
        try:
            pinned = await pin_all(mirrors, self.dataset, names, pins, {}, self.sink)
        finally:  # what cannot be had is asked for by the next import, not by each sync
            with anyio.CancelScope(shield=True):
                for name in new:
                    if await mirrors.withdraw(name):
                        del names[name.key]
        for key, outcome in pinned.items():
            refused = outcome.refused | dict.fromkeys(absent.get(key, ()), _ABSENT)
            outcomes[key] = PinOutcome(refused, outcome.found)
        return outcomes, names

    async def _take(
        self,
        wanted: Sequence[_Wanted],
        outcomes: Mapping[str, PinOutcome],
        names: Mapping[str, MirrorName],
    ) -> list[_Parent]:
        """Put pinned submodules into compositions; return those that have submodules themselves."""
        for key, name in names.items():
            had = {
                module.commit
                for module in wanted
                if module.mirror.key == key and not _refusal(outcomes[key], module.commit)
            }
            if unread := [commit for commit in had if (key, commit) not in self.needs]:
                await self._read(name, unread)
        parents = []
        for module in wanted:
            key = module.mirror.key
            reason = _refusal(outcomes[key], module.commit)
            needs = self.needs.get((key, module.commit))
            if reason or needs is None:
                fact = f"{module.mirror.repo}: {reason or 'its tree cannot be read'}"
                self.miss(module.base, module.path, fact)
                continue
            composition = self.found[module.base]
            part = Module(
                module.path, str(module.link.name), module.git_dir, module.url, str(names[key]),
                module.commit,
            )  # fmt: skip
            self.found[module.base] = replace(composition, modules=(*composition.modules, part))
            if needs.links:
                parents.append(_Parent(module.base, module.path, module.git_dir, names[key], needs))
        return parents


def _resolve(parent: _Parent, link: Link, path: str, parent_url: str, template: str) -> _Wanted:
    """Return from where a submodule is had; ValueError says why it is refused."""
    if link.name is None or not link.url:
        raise ValueError("no entry of .gitmodules has this path and a URL")
    if not _NAME.fullmatch(link.name):
        raise ValueError("its name in .gitmodules is refused")
    name, own_url = _place(parent_url, link.url, template)
    git_dir = f"{parent.git_dir}/modules/{link.name}" if parent.git_dir else f"modules/{link.name}"
    return _Wanted(parent.base, link, path, git_dir, link.url, name, own_url)


# most base commits of a mirror have the same submodules
@lru_cache(maxsize=1000)
def _place(parent_url: str, written: str, template: str) -> tuple[MirrorName, str | None]:
    """Return the mirror of a submodule, and its URL unless a template serves it."""
    url = join_url(parent_url, written)
    try:
        upstream, above = parse_upstream(url), parse_upstream(parent_url)
    except MirrordError as error:
        raise ValueError(f"its URL is refused: {error.message.partition(': ')[2]}") from error
    # else an upstream could have this host's own repositories read
    if upstream.is_local and not above.is_local:
        raise ValueError("its URL is local and that of its parent is not")
    parts = [part for part in re.split(r"[/:]", url.rstrip("/").removesuffix(".git")) if part]
    try:
        name = MirrorName.parse("/".join(parts[-2:]))
    except MirrordError as error:
        raise ValueError(f"its URL {mask_url(url)} does not end in owner/name") from error
    # what a template serves is had as the data sets' own repositories are
    is_usual = upstream.host in ("github.com", urlsplit(template).hostname)
    return name, None if is_usual and not upstream.is_local else url


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


def _refusal(outcome: PinOutcome, commit: CommitId) -> str | None:
    if outcome.found.get(commit, commit) != commit:
        return "upstream is shallow, and lacks the commit's parents"
    return outcome.refused.get(commit) or outcome.refused.get(ALL_COMMITS)


async def _compose(
    mirrors: Mirrors,
    compositions: dict[Key, Composition],
    earlier: Mapping[Key, Composition],
    templates: Path,
) -> frozenset[str]:
    """Write the composed trees that an earlier import did not write.

    Returns the keys of the mirrors whose trees have other LFS objects than before.
    """
    names = {row.name.key: row.name for row in await mirrors.catalog.list_mirrors()}
    jobs: dict[str, list[CommitId]] = {}
    for (key, commit), composition in compositions.items():
        if not composition.modules and composition.lfs_missing == composition.pointers:
            continue
        before = earlier.get((key, commit))
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
        if composition.lfs_missing != _missing_before(earlier.get((key, commit)), composition)
    )


def _missing_before(before: Composition | None, now: Composition) -> int:
    return before.lfs_missing if before else now.pointers


def has_whole(target: Path, composition: Composition) -> bool:
    """Return whether a composed tree is in the repository at `target`."""
    tree = composition.tree
    return tree is not None and exists(target / "objects" / tree[:2] / tree[2:])


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
