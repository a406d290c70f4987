"""Upstreams that cannot be complete: recognised and named, and their complete refs are mirrored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forge import serving
from gitrepos import Upstream, git
from mirror_parts import NAME, Builder, House

from mirrord.errors import MirrordError, UpstreamIncompleteError
from mirrord.git.errors import failure

pytestmark = pytest.mark.slow


@pytest.fixture
def house(tmp_path: Path) -> Builder:
    return Builder(tmp_path, f"file://{tmp_path}/{{owner}}+{{name}}")


def _refusal(house: Builder, url: str) -> MirrordError:
    """Return why the first sync fails; nothing is left of it."""
    caught: list[MirrordError] = []

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", url)
        with pytest.raises(MirrordError) as raised:
            await it.mirrors.sync(NAME)
        caught.append(raised.value)
        assert not it.mirrors.path(NAME).exists()

    house.run(body)
    return caught[0]


def _source(make_upstream: Callable[..., Upstream]) -> Upstream:
    upstream = make_upstream("source")
    for number in range(3):
        upstream.commit({"a": f"{number}"})
    return upstream


def _shallow(upstream: Upstream) -> Path:
    path = upstream.path.with_name("shallow")
    git(upstream.path, "clone", "--quiet", "--bare", "--depth=1", upstream.url, str(path))
    return path


def test_a_shallow_upstream_is_named_and_its_commits_are_kept_without_parents(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    source = _source(make_upstream)
    source.git("tag", "-a", "v1", "-m", "release")
    path = _shallow(source)
    tip = git(path, "rev-parse", "main")

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"file://{path}")
        result = await it.mirrors.sync(NAME)
        assert {(fault.ref, fault.code) for fault in result.faults} == {
            ("refs/heads/main", "upstream-incomplete"),
            ("refs/tags/v1", "upstream-incomplete"),
        }
        for fault in result.faults:
            assert "upstream is shallow: commits of 2 refs lack their parents" in fault.reason
        for name in ("main", "refs/heads/main", "v1", tip):
            found = await it.mirrors.resolve_public(NAME, name)
            assert found.replaces == tip
            assert found.tree == git(path, "rev-parse", f"{tip}^{{tree}}")
            assert found.line == (found.commit,)
        git(it.mirrors.path(NAME), "fsck", "--strict", "--no-dangling")
        again = await it.mirrors.sync(NAME, retry_faults=True)
        assert (again.changed, again.kept_count) == (False, 1)
        git(path, "fetch", "--quiet", "--unshallow", source.url)
        assert not (await it.mirrors.sync(NAME, retry_faults=True)).faults
        assert (await it.mirrors.resolve(NAME, "main")).commit == tip

    house.run(body)


def test_the_complete_refs_of_a_shallow_upstream_are_mirrored(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    path = _shallow(_source(make_upstream))
    tree = git(path, "rev-parse", "HEAD^{tree}")
    whole = git(path, "commit-tree", "-m", "whole", tree)
    git(path, "update-ref", "refs/heads/whole", whole)

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"file://{path}")
        result = await it.mirrors.sync(NAME)
        (fault,) = result.faults
        assert (fault.ref, fault.code) == ("refs/heads/main", "upstream-incomplete")
        assert "upstream is shallow: 1 commit lacks its parents" in fault.reason
        assert (await it.mirrors.resolve(NAME, "whole")).commit == whole

    house.run(body)


def test_a_partial_upstream_is_named(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    upstream = _source(make_upstream)
    upstream.git("config", "uploadpack.allowFilter", "true")
    path = upstream.path.with_name("partial")
    words = ("clone", "--quiet", "--bare", "--filter=blob:none", upstream.url, str(path))
    git(upstream.path, *words)
    error = _refusal(house, f"file://{path}")
    assert isinstance(error, UpstreamIncompleteError)
    assert "partial clone" in (error.hint or "")


def test_a_grafted_upstream_is_named(
    house: Builder, make_upstream: Callable[..., Upstream]
) -> None:
    upstream = _source(make_upstream)
    (upstream.path / ".git/info").mkdir(exist_ok=True)
    (upstream.path / ".git/info/grafts").write_text(upstream.git("rev-parse", "main") + "\n")
    error = _refusal(house, upstream.url)
    assert isinstance(error, UpstreamIncompleteError)
    assert "grafts" in (error.hint or "")


def test_plain_files_are_no_server(house: Builder, make_upstream: Callable[..., Upstream]) -> None:
    upstream = _source(make_upstream)
    upstream.git("update-server-info")
    plain = {
        f"/source/.git/{name}": (upstream.path / ".git" / name).read_bytes()
        for name in ("info/refs", "HEAD")
    }
    with serving(upstream.path.parent) as forge:
        forge.plain = plain
        error = _refusal(house, f"{forge.url}/source/.git")
    assert "plain files (dumb HTTP)" in error.message


@pytest.mark.parametrize(
    ("stderr", "code", "said"),
    [
        (("fatal: detected dubious ownership in repository at '/srv/x.git'\nfatal: Could not read"
         " from remote repository."), "upstream-auth", "safe.directory"),
        (("fatal: unknown repository extension found:\n\trefstorage\nfatal: Could not read from"
         " remote repository."), "upstream-incomplete", "reftable"),
        ("fatal: unable to access 'https://h/x/': The requested URL returned error: 500\n",
         "upstream-unavailable", "safe.directory"),
    ],
)  # fmt: skip
def test_what_a_server_says_of_itself_is_named(stderr: str, code: str, said: str) -> None:
    error = failure("fetch", 128, stderr, upstream=True)
    assert error.code == code
    assert said in (error.hint or "")
