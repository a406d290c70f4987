"""The mirrors of a daemon, through the class the rest of it uses: real catalog, real git, real
HTTP.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import structlog
from forge import Forge, serving
from gitrepos import ENV, Upstream, git
from mirror_parts import NAME, Builder, House
from ports import free_port
from waiting import BOUND_S

from mirrord.audit.refs import read_ref_files
from mirrord.errors import (
    CatalogUnavailableError,
    CommitNotFoundError,
    ConflictError,
    InvalidUrlError,
    MirrorNotFoundError,
    UpstreamAuthError,
    UpstreamError,
    UpstreamThrottledError,
    UpstreamTimeoutError,
)
from mirrord.git.command import Git
from mirrord.mirrors.repository import Repository
from mirrord.model import CommitId, MirrorName
from mirrord.protocol import Progress

pytestmark = pytest.mark.slow

SECRET = "s3cretpassword"


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(3)
    return made


@pytest.fixture
def house(tmp_path: Path, upstream: Upstream) -> Builder:
    return Builder(tmp_path, f"file://{upstream.path.parent}/{{owner}}+{{name}}")


@pytest.fixture
def forge(upstream: Upstream) -> Iterator[Forge]:
    with serving(upstream.path.parent) as made:
        yield made


def test_a_mirror_is_added_synced_and_found_in_any_spelling(
    house: Builder, upstream: Upstream
) -> None:
    """The first spelling is kept; look-ups ignore letter case; a commit resolves."""

    async def body(it: House) -> None:
        row = await it.mirrors.add("Owner/Name", upstream.url)
        assert (await it.mirrors.describe(row.name)).state == "empty"
        await it.mirrors.sync(row.name)
        again = await it.mirrors.add("owner__name")
        assert str(again.name) == str((await it.mirrors.get("OWNER/NAME")).name) == "Owner__Name"
        shown = await it.mirrors.describe(NAME)
        assert (shown.state, shown.default_branch, shown.ref_count) == ("ready", "main", 1)
        assert (shown.size_bytes or 0) > 0
        head = upstream.git("rev-parse", "HEAD"), upstream.git("rev-parse", "HEAD^{tree}")
        assert (await it.mirrors.resolve(NAME, "main"))[:2] == head
        assert len(await it.mirrors.list_mirrors()) == 1

    house.run(body)


def test_a_mirror_is_made_without_git_and_with_all_that_protects_it(
    house: Builder, tmp_path: Path
) -> None:
    async def body(_: House) -> None:
        repository = Repository(Git(home=tmp_path / "home"), NAME, tmp_path / "made")
        with structlog.testing.capture_logs() as told:
            await repository.create()
        assert told == []
        assert read_ref_files(repository.path).bad == []

    house.run(body)


def test_another_url_for_a_mirror_that_exists_is_refused(house: Builder) -> None:
    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        with pytest.raises(ConflictError):
            await it.mirrors.add("Owner/name", "https://example.invalid/x.git")
        with pytest.raises(InvalidUrlError):
            await it.mirrors.add("other/name", "ext::sh -c evil")
        with pytest.raises(MirrorNotFoundError):
            await it.mirrors.get("no such thing at all")

    house.run(body)


def test_syncs_of_one_mirror_at_the_same_time_run_once(house: Builder) -> None:
    """All callers get the same result."""

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        results = []

        async def one() -> None:
            results.append(await it.mirrors.sync(NAME))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(one)
        assert len(results) == 8
        assert len({id(result) for result in results}) == 1
        assert it.events.counts["mirror.synced"] == 1

    house.run(body)


def test_a_sync_brings_what_was_pushed_before_it_was_asked_for(
    house: Builder, upstream: Upstream
) -> None:
    """A running sync has asked upstream already; all callers during it share the next one."""

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        pushed: list[str] = []
        heads: list[str] = []

        async def later() -> None:
            await it.mirrors.sync(NAME)
            heads.append((await it.mirrors.resolve(NAME, "main"))[0])

        async with anyio.create_task_group() as group:

            def push(progress: Progress) -> None:
                if not pushed and progress.unit != "syncs":
                    pushed.append(upstream.commit({"pushed": "while the first sync fetches\n"}))
                    for _ in range(4):
                        group.start_soon(later)

            await it.mirrors.sync(NAME, push)
        assert heads == pushed * 4
        assert it.events.counts["mirror.synced"] == 2

    house.run(body)


def test_whoever_needs_a_mirror_waits_for_its_first_sync(house: Builder) -> None:
    """And asks for none of his own."""

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        async with anyio.create_task_group() as group:
            await it.mirrors.sync(
                NAME, lambda _: (group.start_soon(it.mirrors.resolve, NAME, "main"), None)[1]
            )
        assert it.events.counts["mirror.synced"] == 1

    house.run(body)


def test_a_cancelled_first_sync_leaves_nothing(house: Builder, forge: Forge) -> None:
    """No half mirror, no leftovers, and the next one works."""
    forge.delay_s = 0.2

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
        async with anyio.create_task_group() as group:
            group.start_soon(it.mirrors.sync, NAME)
            with anyio.fail_after(BOUND_S):
                while len(forge.requests) < 2:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        assert not it.mirrors.path(NAME).exists()
        assert not list((house.root / "state/quarantine").iterdir())
        forge.delay_s = 0
        assert (await it.mirrors.sync(NAME)).changed

    house.run(body)


def test_what_a_kill_left_is_removed_at_the_start(house: Builder, upstream: Upstream) -> None:
    """Half fetches, locks and temporary packs go; the mirror works; a journal is finished."""

    async def first(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        pack = it.mirrors.path(NAME) / "objects/pack"
        (pack / "tmp_pack_abc123").write_bytes(b"half")
        (it.mirrors.path(NAME) / "packed-refs.lock").touch()
        (it.mirrors.path(NAME) / "refs/heads/main.lock").touch()
        half = house.root / "state/quarantine/fetch-1234"
        half.mkdir()
        (half / "tmp_pack_1").write_bytes(b"half")
        (it.mirrors.path(NAME) / "mirrord-transaction").write_text(
            f"create refs/heads/x {upstream.git('rev-parse', 'HEAD')}\n"
        )

    async def second(it: House) -> None:
        assert not list((house.root / "state/quarantine").iterdir())
        left = [path.name for path in it.mirrors.path(NAME).rglob("*")]
        assert not [
            name
            for name in left
            if name.startswith("tmp_") or name.endswith(".lock") or name == "mirrord-transaction"
        ]
        assert (await it.mirrors.resolve(NAME, "x"))[0] == upstream.git("rev-parse", "HEAD")
        upstream.commit({"more": "1"})
        assert (await it.mirrors.sync(NAME)).changed

    house.run(first)
    house.run(second)


def test_a_start_and_a_sync_ask_little_where_nothing_changed(house: Builder) -> None:
    """A start asks git nothing, a sync asks upstream for its refs: there may be 2,000 mirrors."""
    house.synced()
    with structlog.testing.capture_logs() as told:

        async def body(it: House) -> None:
            assert "git.ended" not in [line["event"] for line in told]
            assert not (await it.mirrors.sync(NAME)).changed

        house.run(body)
    asked = [line["command"] for line in told if line["event"] == "git.ended"]
    assert [command.split()[:2] for command in asked] == [["ask", "upstream"]]


def test_a_start_looks_closer_where_pins_differ(house: Builder, upstream: Upstream) -> None:
    """A pin that only the mirror has is adopted, one that only the catalog has is reported."""
    older, newer = upstream.git("rev-list", "--max-count=2", "HEAD~1").split()

    async def pin(it: House) -> None:
        await it.mirrors.pin(NAME, [CommitId(newer)], owner="person/7", reason="mine")
        git(it.mirrors.path(NAME), "update-ref", f"refs/mirrord/pins/person/7/{older}", older)
        git(it.mirrors.path(NAME), "update-ref", "-d", f"refs/mirrord/pins/person/7/{newer}")

    async def adopted(it: House) -> None:
        assert {each.commit for each in await it.mirrors.list_pins(NAME)} == {older, newer}

    house.synced().run(pin)
    with structlog.testing.capture_logs() as told:
        house.run(adopted)
    events = {line["event"]: line.get("commit") for line in told}
    assert events.keys() >= {"pins.adopted", "pin.lost"}
    assert events["pin.lost"] == newer


def test_a_lost_catalog_is_rebuilt_from_the_mirrors(house: Builder, upstream: Upstream) -> None:
    """Mirrors and pins are adopted: what keeps commits alive is in git."""
    base = CommitId(upstream.git("rev-parse", "HEAD~1"))

    async def first(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        assert await it.mirrors.pin(NAME, [base], owner="person/7", reason="mine") == {}

    async def second(it: House) -> None:
        assert [(pin.commit, pin.owner) for pin in await it.mirrors.list_pins(NAME)] == [
            (base, "person/7")
        ]

    house.run(first)
    for file in (house.root / "state").glob("catalog.sqlite3*"):
        file.unlink()
    house.run(second)


def test_a_catalog_that_goes_away_while_mirrors_open_is_told_as_such(
    house: Builder, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a group of one error, which the daemon would end of with a traceback."""
    house.synced()
    for file in (house.root / "state").glob("catalog.sqlite3*"):
        file.unlink()

    async def away(*_: object) -> None:
        raise CatalogUnavailableError("away")

    async def never(_: House) -> None:
        raise AssertionError("the mirrors are open")

    monkeypatch.setattr("mirrord.catalog.Catalog.put_mirror", away)
    with pytest.raises(CatalogUnavailableError):
        house.run(never)


def test_removal_waits_for_nobody_to_need_the_mirror(house: Builder, upstream: Upstream) -> None:
    base = CommitId(upstream.git("rev-parse", "HEAD"))

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        await it.mirrors.pin(NAME, [base], owner="person/7", reason="")
        with pytest.raises(ConflictError):
            await it.mirrors.remove(NAME)
        await it.mirrors.unpin(NAME, [base], owner="person/7")
        await it.mirrors.remove(NAME)
        assert not it.mirrors.path(NAME).exists()
        with pytest.raises(MirrorNotFoundError):
            await it.mirrors.get("owner/name")

    house.run(body)


# -- commits by id ---------------------------------------------------------------------------------


def test_a_commit_that_no_ref_brings_is_fetched_by_id(house: Builder, upstream: Upstream) -> None:
    """And resolves; one that no upstream has is returned with the reason."""
    hidden = CommitId(upstream.git("commit-tree", "-p", "HEAD", "-m", "hidden", "HEAD^{tree}"))
    nowhere = CommitId("1" * 40)

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        missing = await it.mirrors.ensure_commits(NAME, [hidden, nowhere])
        assert set(missing) == {nowhere}
        assert (await it.mirrors.resolve(NAME, hidden))[0] == hidden
        with pytest.raises(CommitNotFoundError):
            await it.mirrors.resolve(NAME, nowhere)

    house.run(body)


def test_fallbacks_are_asked_for_what_upstream_lost(
    house: Builder, upstream: Upstream, make_upstream: Callable[..., Upstream]
) -> None:
    other = make_upstream("fallback+name")
    lost = CommitId(other.commit({"only": "here"}))
    house.values["upstream"]["fallbacks"] = [f"file://{other.path.parent}/fallback+{{name}}"]  # type: ignore[index]

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        assert await it.mirrors.ensure_commits(NAME, [lost]) == {}

    house.run(body)


def test_a_commit_whose_closure_has_a_hole_is_not_pinned(
    house: Builder, upstream: Upstream
) -> None:
    """A pin is a proof, so an incomplete commit gets none."""
    base = CommitId(upstream.git("rev-parse", "HEAD"))
    blob = upstream.git("rev-parse", "HEAD:README")

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        _lose(it.mirrors.path(NAME), blob)
        refused = await it.mirrors.pin(
            NAME, [base, CommitId("2" * 40)], owner="dataset/d", reason=""
        )
        assert set(refused) == {base, "2" * 40}
        assert not await it.mirrors.list_pins(NAME)

    house.run(body)


def _lose(mirror: Path, blob: str) -> None:
    """Unpack everything and delete one object."""
    packs = list((mirror / "objects/pack").glob("*.pack"))
    for pack in packs:
        data = pack.read_bytes()
        for file in (mirror / "objects/pack").glob(f"{pack.stem}.*"):
            file.unlink()
        git(mirror, "unpack-objects", "-q", stdin=data)
    (mirror / "objects" / blob[:2] / blob[2:]).unlink()


def test_a_pin_survives_maintenance_and_what_nobody_needs_is_kept_a_while(
    house: Builder, upstream: Upstream
) -> None:
    """Packing drops no object, pinned or fresh."""
    hidden = CommitId(upstream.git("commit-tree", "-p", "HEAD", "-m", "hidden", "HEAD^{tree}"))
    pinned = CommitId(upstream.git("commit-tree", "-p", "HEAD~1", "-m", "pinned", "HEAD^{tree}"))

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        assert await it.mirrors.ensure_commits(NAME, [hidden, pinned]) == {}
        assert await it.mirrors.pin(NAME, [pinned], owner="dataset/d", reason="") == {}
        for _ in range(3):
            upstream.commit({"more": str(_)})
            await it.mirrors.sync(NAME)
            await it.mirrors.maintain(NAME)
        path = it.mirrors.path(NAME)
        for commit in (hidden, pinned):
            git(path, "rev-list", "--objects", commit)
        git(path, "fsck", "--full")
        git(path, "commit-graph", "verify")
        git(path, "multi-pack-index", "verify")

    house.run(body)


def test_old_refs_are_put_back_and_nothing_is_lost(house: Builder, upstream: Upstream) -> None:
    async def body(it: House) -> None:
        await it.mirrors.add("owner/name")
        await it.mirrors.sync(NAME)
        old = upstream.git("rev-parse", "HEAD")
        new = upstream.commit({"more": "1"})
        await it.mirrors.sync(NAME)
        newest, oldest = await it.mirrors.refs_log(NAME)
        diff = await it.mirrors.refs_diff(NAME, oldest.id[:10], newest.at.isoformat())
        assert [(c.kind, c.old, c.new) for c in diff.changes] == [("forwarded", old, new)]
        await it.mirrors.refs_restore(NAME, oldest.id)
        assert (await it.mirrors.resolve(NAME, "main"))[0] == old
        assert git(it.mirrors.path(NAME), "rev-parse", f"refs/mirrord/kept/{new}") == new
        await it.mirrors.sync(NAME)
        assert (await it.mirrors.resolve(NAME, "main"))[0] == new

    house.run(body)


# -- over HTTP -------------------------------------------------------------------------------------


def test_http_with_a_password_works_and_shows_it_nowhere(house: Builder, forge: Forge) -> None:
    """Not in answers, not in errors, not in the mirror's files."""
    forge.password = SECRET

    async def body(it: House) -> None:
        url = f"{forge.url}/owner+name/.git".replace("//", f"//me:{SECRET}@")
        await it.mirrors.add("owner/name", url)
        await it.mirrors.sync(NAME)
        forge.password = "changed"
        with pytest.raises(UpstreamAuthError) as caught:
            await it.mirrors.sync(NAME)
        shown = await it.mirrors.describe(NAME)
        assert shown.state == "failed"
        assert SECRET not in f"{caught.value.problem()} {shown}"

    house.run(body)
    files = [path for path in (house.root / "state/mirrors").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_wanted_password_is_an_error_at_once(house: Builder, forge: Forge) -> None:
    forge.password = SECRET

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
        with pytest.raises(UpstreamAuthError):
            await it.mirrors.sync(NAME)
        assert not it.mirrors.path(NAME).exists()

    house.run(body)


def test_the_git_protocol_works(house: Builder, upstream: Upstream) -> None:
    port = free_port()
    listen = [
        f"--base-path={upstream.path.parent}",
        "--export-all",
        "--listen=127.0.0.1",
        f"--port={port}",
        "--reuseaddr",
    ]
    daemon = subprocess.Popen(
        ["/usr/lib/git-core/git-daemon", *listen], env=ENV, stderr=subprocess.DEVNULL
    )

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"git://127.0.0.1:{port}/owner+name/.git")
        with anyio.fail_after(BOUND_S):
            while not await _listens(port):
                await anyio.sleep(0.02)
        assert (await it.mirrors.sync(NAME)).ref_count == 1

    try:
        house.run(body)
    finally:
        daemon.kill()
        daemon.wait()


async def _listens(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port):
            return True
    except OSError:
        return False


def test_a_redirect_is_followed(house: Builder, forge: Forge) -> None:
    """A repository that was renamed upstream is still mirrored."""
    forge.redirect_to = "/owner+name/.git"

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/old.git")
        assert (await it.mirrors.sync(NAME)).ref_count == 1

    house.run(body)


def test_a_throttling_host_is_left_alone(house: Builder, forge: Forge) -> None:
    """After one 429 no further request is sent until Retry-After has passed."""
    forge.answers = [(429, {"Retry-After": "120"})]

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
        for _ in range(3):
            with pytest.raises(UpstreamThrottledError) as caught:
                await it.mirrors.sync(NAME)
            assert caught.value.facts["retry_after_s"] >= 100
        assert len(forge.requests) == 1

    house.run(body)


@pytest.mark.parametrize(
    ("status", "headers", "body", "code"),
    [
        (429, {}, b"slow down", "upstream-throttled"),
        (403, {"Retry-After": "600"}, b"", "upstream-throttled"),
        (403, {}, b"You have exceeded a secondary rate limit.", "upstream-throttled"),
        (403, {"X-RateLimit-Remaining": "0"}, b"", "upstream-throttled"),
        (403, {"X-RateLimit-Remaining": "9"}, b"", "upstream-auth"),
        (503, {}, b"", "upstream-unavailable"),
        (403, {}, b"Repository unavailable due to DMCA takedown.", "upstream-not-found"),
        (451, {}, b"It was withdrawn.", "upstream-not-found"),
        (410, {}, b"It is gone.", "upstream-not-found"),
    ],
)
def test_a_refusal_is_told_by_its_reason_in_the_forge_s_words(
    house: Builder, forge: Forge, status: int, headers: dict[str, str], body: bytes, code: str
) -> None:
    """One that is unwell is asked once, also for its other repositories; the mirror serves on."""

    async def main(it: House) -> None:
        for name in ("owner/name", "owner/other"):
            await it.mirrors.add(name, f"{forge.url}/owner+name/.git")
        await it.mirrors.sync(NAME)
        before = len(forge.requests)
        forge.refusal = status, {"Content-Type": "text/plain", **headers}, body
        with pytest.raises(UpstreamError) as caught:
            await it.mirrors.sync(NAME)
        assert caught.value.code == code
        assert body.decode() in caught.value.message
        assert len(forge.requests) == before + 1
        if "Retry-After" in headers:
            with pytest.raises(UpstreamThrottledError):
                await it.mirrors.sync(MirrorName("owner", "other"))
            assert len(forge.requests) == before + 1
        forge.refusal = None
        assert (await it.mirrors.resolve(NAME, "main")).commit

    house.run(main)


def test_requests_to_one_host_are_limited(house: Builder, forge: Forge) -> None:
    """However many mirrors want to sync."""
    house.values["sync"] = {"concurrency": 2}
    forge.delay_s = 0.05

    async def body(it: House) -> None:
        async with anyio.create_task_group() as group:
            for n in range(6):
                row = await it.mirrors.add(f"owner/name{n}", f"{forge.url}/owner+name/.git")
                group.start_soon(it.mirrors.sync, row.name)
        assert forge.most_active <= 2

    house.run(body)


def test_a_silent_host_costs_the_timeout(house: Builder, forge: Forge) -> None:
    forge.delay_s = 2
    house.values["upstream"]["timeout"] = "300ms"  # type: ignore[index]

    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
        with pytest.raises(UpstreamTimeoutError):
            await it.mirrors.sync(NAME)

    house.run(body)


def test_garbage_changes_nothing(house: Builder, forge: Forge) -> None:
    async def body(it: House) -> None:
        await it.mirrors.add("owner/name", f"{forge.url}/owner+name/.git")
        await it.mirrors.sync(NAME)
        before = git(it.mirrors.path(NAME), "for-each-ref")
        forge.answers = [(200, {"Content-Type": "text/html"})]
        with pytest.raises(UpstreamError):
            await it.mirrors.sync(NAME)
        assert git(it.mirrors.path(NAME), "for-each-ref") == before

    house.run(body)
