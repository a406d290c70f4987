"""Look-ups of instances and their commits, cached: a warm checkout needs no query."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from cachetools import LRUCache

from .. import errors
from ..catalog import Catalog, Choice, Composition, InstanceRow
from ..model import CommitId, CommitRole, History, MirrorName, shown
from ..protocol import Instance, RecordedCommit
from ..testlogs import SCRIPTS

K = TypeVar("K")
T = TypeVar("T")


class _CachedRow(NamedTuple, Generic[T]):
    value: T
    size_bytes: int
    version: int


class QueryCache(Generic[K, T]):
    """A cache of catalog queries, so that a warm checkout needs none. Belongs to one event loop.

    Least recently used entries are evicted over `limit_bytes`. A stale entry is loaded again, and
    still answers while the catalog cannot be reached. An entry of size 0 is not kept.
    """

    def __init__(
        self,
        load: Callable[[K], Awaitable[T]],
        size_of: Callable[[T], int] = lambda value: 200 * (value is not None),
        *,
        limit_bytes: int = 16 * 1024**2,
    ) -> None:
        self._load, self._size_of, self._entry_max_bytes = load, size_of, limit_bytes // 16
        self._entries: LRUCache[K, _CachedRow[T]] = LRUCache(
            limit_bytes, getsizeof=attrgetter("size_bytes")
        )
        self._version = 0

    async def find(self, key: K) -> T:
        version, entry = self._version, self._entries.get(key)
        if entry is not None and entry.version == version:
            return entry.value
        try:
            value = await self._load(key)
        except errors.CatalogUnavailableError:
            if entry is None:
                raise
            return entry.value
        # the stale one goes even where the new one is too large to be kept
        self._entries.pop(key, None)
        size_bytes = self._size_of(value)
        if 0 < size_bytes <= self._entry_max_bytes:
            self._entries[key] = _CachedRow(value, size_bytes, version)
        return value

    def add(self, key: K, value: T) -> None:
        """Keep an answer that another key gave, unless there is one."""
        if key not in self._entries and 0 < (size := self._size_of(value)) <= self._entry_max_bytes:
            self._entries[key] = _CachedRow(value, size, self._version)

    def expire(self) -> None:
        """Make every entry stale, also those that are being loaded."""
        self._version += 1


def _size_of(choice: Choice | None) -> int:
    if choice is None:  # a client could fill the cache with ids that do not exist
        return 0
    row = choice.row
    tests = sum(len(test) + 60 for test in (*row.fail_to_pass, *row.pass_to_pass))
    return 1000 + len(row.patch or "") + len(row.test_patch or "") + tests


class Lookups:
    """What requests ask of the datasets in `catalog`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._instances = QueryCache[tuple[str, str | None], Choice | None](
            lambda key: catalog.choose_instance(*key), _size_of
        )
        self._base_commits = QueryCache[tuple[str, str], CommitId | None](
            lambda key: catalog.find_base_commit(*key)
        )
        self._history_limits = QueryCache[tuple[str, CommitId], History | None](
            lambda key: catalog.find_history_limit(*key), lambda _: 200
        )
        self._compositions = QueryCache[tuple[str, CommitId], Composition | None](
            lambda key: catalog.find_composition(*key), lambda _: 1000
        )

    def expire_cache(self) -> None:
        """Read rows again when next asked for: some changed, perhaps by another daemon."""
        for cache in (self._instances, self._base_commits, self._history_limits):
            cache.expire()
        self._compositions.expire()

    async def find_instance(self, identity: str, dataset: str | None = None) -> InstanceRow | None:
        """Find an instance by its exact id, cached, for whoever needs its tests.

        Raises the errors of `choose_instance`, and InstanceAmbiguousError where datasets record
        other tests.
        """
        choice = await self.choose_instance(identity, dataset)
        if choice is None:
            return None
        choice.must_be_one()
        return choice.row

    async def choose_instance(self, identity: str, dataset: str | None = None) -> Choice | None:
        """Choose the row that a checkout is made of, by its exact id, cached.

        Of several datasets with the same instance, the first imported one with tests is taken.
        Raises InstanceAmbiguousError if they differ in repository or base commit.
        """
        choice = await self._instances.find((identity, dataset))
        if choice is not None:  # a checkout asks by this name, also while the catalog is away
            named = None if choice.rivals else choice.row.dataset
            self._instances.add((choice.row.public_id, named), choice)
        return choice

    async def find_base_commit(self, name: MirrorName, digits: str) -> CommitId | None:
        """Find the only base commit of the mirror's instances with this prefix, cached."""
        return await self._base_commits.find((name.key, digits))

    async def find_history_limit(self, name: MirrorName, commit: CommitId) -> History | None:
        """Find how much history agents may see of a base commit, cached."""
        return await self._history_limits.find((name.key, commit))

    async def find_composition(self, name: MirrorName, commit: CommitId) -> Composition | None:
        """Find what a base commit needs from elsewhere, cached."""
        return await self._compositions.find((name.key, commit))

    async def instance(self, identity: str, grader: bool, dataset: str | None = None) -> Instance:
        """Return an instance, with its answer for a grader.

        Raises InstanceNotFoundError, and InstanceAmbiguousError as its view needs it.
        """
        choice = await self.choose_instance(identity, dataset)
        if choice is None:
            raise errors.InstanceNotFoundError(
                f"cannot find instance {shown(identity)}: no dataset has that id",
                hint="ids are case-sensitive; `mirrord dataset list` shows the datasets; name a"
                " commit as NAME@SHA",
            )
        if grader:
            choice.must_be_one()
        row = choice.row
        commits = [RecordedCommit(commit=commit, role=role) for commit, role in row.commits]
        agent_view = Instance(
            id=row.public_id,
            dataset=row.dataset,
            mirror=str(row.mirror),
            repo=row.repo,
            base_commit=row.base_commit,
            commits=[recorded for recorded in commits if recorded.role is CommitRole.BASE],
        )
        if not grader:
            return agent_view
        scalars = (
            *("id", "public_id", "direction", "patch", "test_patch", "environment"),
            *("python_version", "version", "workdir", "created_at", "history"),
            "revision",
        )
        answer: dict[str, Any] = {name: getattr(row, name) for name in scalars}
        for name in ("fail_to_pass", "pass_to_pass", "rules"):
            answer[name] = list(getattr(row, name))
        config = row.install_config or {}
        answer["scripts"] = {name: config[name] for name in SCRIPTS if name in config}
        if row.base_commit and (needs := await self.find_composition(row.mirror, row.base_commit)):
            answer["submodules"] = [module.path for module in needs.modules]
            answer["missing"] = dict(needs.missing)
            answer |= {"lfs_pointers": needs.pointers, "lfs_missing": needs.lfs_missing}
        return replace(agent_view, commits=commits, **answer)
