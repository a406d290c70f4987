"""Mirrors that nothing is wrong with, in whatever state work and chance leave them: an audit of one that finds anything lies.

A mirror lives on through the numbers of its part. Each number changes its upstream, lets mirrord work, or leaves what a git at
work, or killed, leaves; then it is audited at a level that chance chose, and healing is off.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from gitrepos import Upstream, git
from heal_parts import Daemon

from mirrord.model import AuditLevel, CommitId, CommitState
from mirrord.protocol import StartAudit

from .plan import Part, told
from .report import Row
from .rounds import living, parts_of

_FAULT = "none: an undamaged mirror is audited"
_PERSON = "person/7"


def parts() -> list[Part]:
    return parts_of("undamaged", rounds)


def rounds(seed: int, numbers: Collection[int]) -> Iterator[Row]:
    """One row for each number; the same seed and numbers are the same states."""
    with living(Life) as (life, portal):
        for number in numbers:
            chance = random.Random(f"{seed} undamaged {number}")
            name = chance.choice(list(CHANGES))
            level = chance.choice(list(AuditLevel))
            yield told(
                _FAULT,
                f"audit, level {level}",
                name,
                partial(portal.call, life.live_on, name, chance, level),
            )


class Life(Daemon):
    """A mirror with a dataset, pins and a past; its upstream goes on."""

    def __init__(self, root: Path) -> None:
        self.upstream = Upstream(root / "name")
        super().__init__(root, self.upstream)
        self.count = 0

    @property
    def mirror(self) -> Path:
        return self.mirrors.path(self.name)

    async def furnish(self) -> None:
        commits = self.upstream.history(6)
        await self.mirror_and_pin(
            {f"owner__name-{n}": CommitId(oid) for n, oid in enumerate(commits[:4])}
        )

    async def live_on(self, change: str, chance: random.Random, level: AuditLevel) -> Row:
        """Change something, and have an audit find nothing."""
        self.count += 1
        await CHANGES[change](self, chance)
        audit = await self.audits.run(StartAudit(level=level, heal=False))
        assert not audit.findings, (
            f"false alarm: {[finding.detail for finding in audit.findings[:3]]}"
        )
        assert (audit.counts, audit.affected, audit.left) == ({CommitState.OK: 4}, [], []), (
            audit.counts
        )
        return Row(_FAULT, f"audit, level {level}", change, "found nothing")

    async def sync(self) -> None:
        result = await self.mirrors.sync(self.name, accept_loss=True)
        assert not result.faults, result.faults

    def a_commit(self, chance: random.Random) -> CommitId:
        return CommitId(chance.choice(git(self.mirror, "rev-list", "refs/heads/main").splitlines()))


Change = Callable[[Life, random.Random], Awaitable[None]]


# -- what upstream does -----------------------------------------------------------------------------------------------


def upstream(work: Callable[[Upstream, int, random.Random], object]) -> Change:
    """A change of upstream, and the sync that brings it."""

    async def change(life: Life, chance: random.Random) -> None:
        work(life.upstream, life.count, chance)
        life.upstream.git("checkout", "--quiet", "main")
        await life.sync()

    return change


def _force_push(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git("reset", "--quiet", "--hard", f"HEAD~{chance.randint(1, 2)}")
    upstream.commit({f"forced{n}": f"{n}\n"})
    upstream.commit({f"forced{n}": f"{n} again\n"})


def _merge(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git("checkout", "--quiet", "-b", f"topic{n}", f"HEAD~{chance.randint(1, 3)}")
    upstream.commit({f"topic{n}": "x\n"})
    upstream.git("checkout", "--quiet", "main")
    upstream.git("merge", "--quiet", "--no-edit", f"topic{n}")


def _submodule(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git(
        "update-index", "--add", "--cacheinfo", f"160000,{chance.getrandbits(160):040x},sub{n}"
    )
    upstream.git("commit", "--quiet", "--message", "a submodule")
    (upstream.path / f"sub{n}").mkdir()


def _tags(upstream: Upstream, n: int, chance: random.Random) -> None:
    for number in range(chance.randint(1, 60)):
        upstream.git(
            "tag", *(("-a", "-m", "a tag") if number % 2 else ()), f"v{n}.{number}", "HEAD"
        )


def _delete_branch(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git("branch", "--force", "passing", f"HEAD~{chance.randint(0, 2)}")
    topics = upstream.git(
        "for-each-ref", "--format=%(refname:short)", "refs/heads/topic*"
    ).splitlines()
    if topics:
        upstream.git("branch", "--quiet", "-D", chance.choice(topics))


def _rename_branch(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git("branch", f"deep{n}")
    upstream.git("branch", "-m", f"deep{n}", f"deep{n}/er")


def _orphan(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.git("checkout", "--quiet", "--orphan", f"orphan{n}")
    upstream.commit({"elsewhere": f"{n}\n"})


def _files(upstream: Upstream, n: int, chance: random.Random) -> None:
    upstream.commit(
        {f"empty{n}": "", f"binary{n}": chance.randbytes(20_000), f"d{n}/{'x/' * 20}deep": "y\n"}
    )
    (upstream.path / f"link{n}").symlink_to("nowhere")
    upstream.commit({f"dir{n}/caf\u00e9": "z\n", f"empty{n}": None})


def _empty_commits(upstream: Upstream, n: int, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 5)):
        upstream.commit()


# -- what mirrord does ------------------------------------------------------------------------------------------------


async def _sync_nothing(life: Life, chance: random.Random) -> None:
    await life.sync()


async def _maintain(life: Life, chance: random.Random) -> None:
    if chance.random() < 0.5:
        (life.mirror / "mirrord-repacked").unlink(missing_ok=True)
    await life.mirrors.maintain(life.name)


async def _pin(life: Life, chance: random.Random) -> None:
    commits = {life.a_commit(chance) for _ in range(chance.randint(1, 5))}
    assert await life.mirrors.pin(life.name, commits, owner=_PERSON, reason="chance") == {}


async def _unpin(life: Life, chance: random.Random) -> None:
    pinned = [pin.commit for pin in await life.catalog.list_pins(life.name.key, owner=_PERSON)]
    await life.mirrors.unpin(life.name, pinned[:3], owner=_PERSON)


async def _restart(life: Life, chance: random.Random) -> None:
    await life.close()
    await life.open()


# -- what a git leaves ------------------------------------------------------------------------------------------------


def by_git(*commands: tuple[str, ...]) -> Change:
    """What somebody's git does to the mirror and harms nothing."""

    async def change(life: Life, chance: random.Random) -> None:
        for command in commands:
            git(life.mirror, *command)

    return change


async def _unreachable(life: Life, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 9)):
        git(
            life.mirror,
            "hash-object",
            "-w",
            "--stdin",
            stdin=chance.randbytes(chance.randint(0, 5000)),
        )


async def _half_written(life: Life, chance: random.Random) -> None:
    """Files of a git at work, or killed."""
    pack = life.mirror / "objects/pack"
    for name in (f"tmp_pack_{life.count}", f"tmp_idx_{life.count}", f"tmp_rev_{life.count}"):
        (pack / name).write_bytes(b"PACK" + chance.randbytes(100))
    (life.mirror / "objects/5e").mkdir(exist_ok=True)
    (life.mirror / f"objects/5e/tmp_obj_{life.count}").write_bytes(chance.randbytes(50))


async def _loose(life: Life, chance: random.Random) -> None:
    """Every object a file of its own."""
    for index in list((life.mirror / "objects/pack").glob("pack-*.idx")):
        aside = life.mirror / f"aside-{life.count}"
        pack = index.with_suffix(".pack")
        pack.rename(aside)
        (life.mirror / "objects/pack/multi-pack-index").unlink(missing_ok=True)
        for file in index.parent.glob(f"{index.stem}.*"):
            file.unlink()
        git(life.mirror, "unpack-objects", "-q", stdin=aside.read_bytes())
        aside.unlink()


CHANGES: dict[str, Change] = {
    "commits": upstream(lambda up, n, chance: up.history(chance.randint(1, 3))),
    "empty commits": upstream(_empty_commits),
    "files of every kind": upstream(_files),
    "a merge": upstream(_merge),
    "a force push": upstream(_force_push),
    "a deleted branch": upstream(_delete_branch),
    "a branch that became a directory": upstream(_rename_branch),
    "an orphan branch": upstream(_orphan),
    "a submodule": upstream(_submodule),
    "many tags": upstream(_tags),
    "a sync of nothing": _sync_nothing,
    "maintenance": _maintain,
    "pins": _pin,
    "pins given up": _unpin,
    "a restart": _restart,
    "unreachable objects": _unreachable,
    "half-written files": _half_written,
    "loose objects": _loose,
    "one pack with a bitmap": by_git(("repack", "-adbq")),
    "a multi-pack index": by_git(("repack", "-dq"), ("multi-pack-index", "write")),
    "a chain of commit-graphs": by_git(("commit-graph", "write", "--reachable", "--split")),
    "a cruft pack": by_git(("repack", "--cruft", "-dq")),
    "packed refs": by_git(("pack-refs", "--all")),
}
