"""Proofs that are kept: nothing is walked twice, and nothing is believed whose files changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House

from mirrord.datasets.pinning import pin_all
from mirrord.git import command
from mirrord.host import children
from mirrord.mirrors.pins import verify_commits
from mirrord.mirrors.proofs import PROOF, end_proof, find_proven
from mirrord.model import CommitId, DatasetName

Body = Callable[[House], Awaitable[None]]


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(6)
    return made


@pytest.fixture
def run(tmp_path: Path, upstream: Upstream) -> Callable[[Body], None]:
    return Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}").synced().run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of every git process of this process."""
    commands: list[str] = []
    start = children.start

    def note(argv: list[str], *args: Any) -> Any:
        commands.append(" ".join(argv[argv.index("git") :]))
        return start(argv, *args)

    monkeypatch.setattr(command, "start", note)
    return commands


def back(upstream: Upstream, steps: int) -> CommitId:
    return CommitId(upstream.git("rev-parse", f"HEAD~{steps}"))


def test_what_was_reached_is_proven_and_only_what_is_new_is_walked(
    run: Callable[[Body], None], upstream: Upstream, started: list[str]
) -> None:
    async def body(it: House) -> None:
        repository = it.mirrors.repository(NAME)
        assert await verify_commits(repository, [back(upstream, 1)]) == {}
        started.clear()
        older = [back(upstream, steps) for steps in (1, 2, 5)]
        assert await verify_commits(repository, older) == {}
        assert started == []
        assert find_proven(repository.path, [back(upstream, 0)]) == set()
        assert await verify_commits(repository, [back(upstream, 0), *older]) == {}
        assert [words.partition("rev-list")[1] for words in started] == ["", "rev-list"]
        assert find_proven(repository.path, older) == {*older}
        upstream.commit({"new": "line\n"})
        await it.mirrors.sync(NAME)  # new packs and loose objects end no proof
        assert find_proven(repository.path, older) == {*older}

    run(body)


@pytest.mark.parametrize("damage", ["gone", "changed", "repacked", "ended", "cut"])
def test_no_proof_is_believed_after_what_may_have_damaged_it(
    run: Callable[[Body], None], upstream: Upstream, damage: str
) -> None:
    async def body(it: House) -> None:
        repository, commits = it.mirrors.repository(NAME), [back(upstream, 0)]
        assert await verify_commits(repository, commits) == {}
        (pack,) = repository.objects.glob("pack/*.pack")
        proof = repository.path / PROOF
        if damage == "gone":
            pack.rename(repository.path / "elsewhere")
        elif damage == "changed":
            content = pack.read_bytes()
            pack.chmod(0o600)
            pack.write_bytes(content[:40] + bytes(40) + content[80:])
        elif damage == "repacked":
            git(repository.path, "repack", "-adfq", "--no-write-bitmap-index")
        elif damage == "cut":
            proof.write_bytes(proof.read_bytes()[:-7])
        else:
            end_proof(repository.path)
        assert find_proven(repository.path, commits) == set()
        is_damaged = damage in {"gone", "changed"}
        assert bool(await verify_commits(repository, commits)) is is_damaged

    run(body)


def test_an_unchanged_import_starts_no_git(
    run: Callable[[Body], None], upstream: Upstream, started: list[str]
) -> None:
    async def body(it: House) -> None:
        commits = {NAME.key: {back(upstream, steps): "base" for steps in (0, 2, 4)}}
        dataset, names = DatasetName("tasks"), {NAME.key: NAME}
        first = await pin_all(it.mirrors, dataset, names, commits, {}, None)
        started.clear()
        assert await pin_all(it.mirrors, dataset, names, commits, {}, None) == first
        assert started == []
        git(it.mirrors.path(NAME), "update-ref", "-d", pins(it)[0])
        await pin_all(it.mirrors, dataset, names, commits, {}, None)
        assert len(pins(it)) == 3

    run(body)


def pins(it: House) -> list[str]:
    words = ("for-each-ref", "--format=%(refname)", "refs/mirrord/pins/")
    return git(it.mirrors.path(NAME), *words).split()
