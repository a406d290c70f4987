"""Another upstream for a mirror that exists: what it must have, and the record of the change."""

from collections.abc import Collection
from dataclasses import replace

from .. import errors
from ..git.command import Git
from ..model import CommitId
from .history import read_last, write_record
from .refs import commit
from .repository import HISTORY, Repository
from .upstreams.fetching import Fetcher

_MAX_LACKING = 20  # each costs an exchange


async def find_lacking(git: Git, fetcher: Fetcher, commits: Collection[CommitId]) -> list[str]:
    """Return commits that the upstream does not have, at most 20.

    They are asked for by id, without parents or trees, into an empty repository.
    """
    lacking: list[str] = []
    async with fetcher.quarantine.directory("asked") as directory:
        scratch = Repository(git, fetcher.repository.name, directory / "repository")
        await scratch.create()
        asking = replace(fetcher, repository=scratch)
        options, env = ("--depth=1", "--filter=tree:0"), {"GIT_SHALLOW_FILE": f"{directory}/cut"}
        remote = fetcher.upstream.remote.url
        while wanted := sorted(set(commits).difference(lacking)):
            try:
                await asking.fetch_into(scratch.objects, wanted, remote, (), options, env)
            except errors.UpstreamError as error:
                named = [oid for oid in error.facts.get("objects", ()) if oid in wanted]
                if not named:
                    raise
                lacking += named
                if len(lacking) < _MAX_LACKING:
                    continue
            break
    return lacking


async def record_move(repository: Repository, why: str) -> None:
    """Add a record to the ref history that moves no ref."""
    parent = (await repository.all_refs()).get(HISTORY)
    if parent is None:
        return
    last = await read_last(repository, parent)
    record = await write_record(
        repository, last.followed, last.head, [],
        kept=last.kept, parents=[parent], why=why, last=last,
    )  # fmt: skip
    await commit(repository, {HISTORY: (parent, record)}, None)
