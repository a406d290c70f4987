"""The template store: what is mounted equals the commit, is built once, and survives damage."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gitrepos import ENV, Upstream
from mounted_templates import busy
from template_parts import NAME, Mounted, Store, assert_equals_commit, run

from mirrord.errors import CommitNotFoundError, CommitUnservableError
from mirrord.templates.layers import build_layer, read_record
from mirrord.templates.service import find_bad_packs
from mirrord.workers.pool import Workers

pytestmark = pytest.mark.root


def test_a_keyframe_and_a_delta_show_their_commits(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """The first commit is a whole tree, the next a delta on it; both are clean when mounted."""
    upstream = make_upstream("up")
    files = {f"d{n % 9}/f{n}": f"{n}\n" * 50 for n in range(90)}
    first = upstream.commit(
        {**files, "gone/deep/x": "x", "gone/y": "y", "keep/a": "a", "keep/b": "b"}
    )
    second = upstream.commit(
        {"gone/deep/x": None, "gone/y": None, "keep/a": None, "d1/f1": "new\n", "d1/new": "new"}
    )

    async def test(store: Store) -> None:
        a, b = await store.ensure(first), await store.ensure(second)
        assert (len(a.layers), len(b.layers)) == (3, 4)
        assert_equals_commit(a, tmp_path / "a", upstream.git("rev-parse", f"{first}^{{tree}}"))
        assert_equals_commit(b, tmp_path / "b", upstream.git("rev-parse", f"{second}^{{tree}}"))

    run(tmp_path, upstream, test)


def test_every_change_of_kind_works_in_a_chain_of_deltas(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """File, directory, symlink and submodule turn into each other; names are bytes and differ in
    case only.
    """
    upstream = make_upstream("up")
    up = upstream.path
    filler = {f"fill/{n}": "filler " * 999 for n in range(90)}
    commits = [
        upstream.commit(
            {**filler, "a": "file", "b/x/y": "1", "b/z": "2", "c": "file", "Case": "1", "case": "2"}
        )
    ]
    os.symlink("nowhere", os.fsencode(up) + b"/d-\xff")
    upstream.write({"a": None})
    upstream.write({"a/in/side": "now a directory", "case": None})
    shutil.rmtree(up / "b")
    (up / "b").write_text("now a file")
    commits.append(upstream.commit())
    (up / "b").unlink()
    upstream.write({"b/x/other": "a directory again"})
    upstream.git("add", "--all")
    upstream.git("rm", "-rq", "--cached", "a")
    shutil.rmtree(up / "a")
    upstream.git("update-index", "--add", "--cacheinfo", f"160000,{commits[0]},a")
    upstream.git("commit", "-qm", "a is a submodule")
    commits.append(upstream.git("rev-parse", "HEAD"))
    upstream.git("update-index", "--force-remove", "a")
    upstream.write({"a": "a file again", "c": None})
    os.symlink("b", up / "c")
    commits.append(upstream.commit())
    upstream.git("update-index", "--chmod=+x", "Case")
    upstream.git("commit", "-qm", "mode")
    commits.append(upstream.git("rev-parse", "HEAD"))

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        assert max(len(template.layers) for template in made) > 3
        for number, (commit, template) in enumerate(zip(commits, made, strict=True)):
            assert_equals_commit(
                template, tmp_path / str(number), upstream.git("rev-parse", f"{commit}^{{tree}}")
            )
        assert await store.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_a_template_is_built_once_however_many_ask(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Sixteen at once get the same; one that gives up does not spoil it for the rest."""
    upstream = make_upstream("up")
    commit = upstream.history(3)[-1]

    async def test(store: Store) -> None:
        impatient = asyncio.create_task(store.ensure(commit))
        rest = [asyncio.create_task(store.ensure(commit)) for _ in range(16)]
        await asyncio.sleep(0.01)
        impatient.cancel()
        assert len(set(await asyncio.gather(*rest))) == 1
        assert store.events.counts["template.built"] == 1
        assert store.find(commit) == rest[0].result()

    run(tmp_path, upstream, test)


def test_later_callers_do_not_get_an_earlier_failure(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a build failed of may have been healed before the others asked: they share one more
    build.
    """
    upstream = make_upstream("up")
    commit = upstream.history(1)[-1]
    call = Workers.run
    asked = asyncio.Event()
    failures: list[object] = []

    async def failing_once(self: Workers, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "build_layer" and not failures:
            failures.append(function)
            await asked.wait()
            raise CommitUnservableError("cannot serve it: a blob is missing")
        return await call(self, function, *args, **kwargs)

    async def body(store: Store) -> None:
        monkeypatch.setattr(Workers, "run", failing_once)
        first = asyncio.create_task(store.ensure(commit))
        while not failures:
            await asyncio.sleep(0.01)
        later = [asyncio.create_task(store.ensure(commit)) for _ in range(4)]
        await asyncio.sleep(0)
        asked.set()
        with pytest.raises(CommitUnservableError):
            await first
        assert len(set(await asyncio.gather(*later))) == 1
        assert store.events.counts["template.built"] == 1

    run(tmp_path, upstream, body)


def test_a_failed_removal_is_retried(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Of layers, stores, closure packs and shared files, without a start."""
    upstream = make_upstream("up")
    first = upstream.commit({f"d{n % 9}/f{n}": f"{n}\n" * 50 for n in range(90)})
    commits = first, upstream.commit({"d1/f1": "new\n"})

    async def body(store: Store) -> None:
        for commit in commits:
            await store.ensure(commit)
        shelf = store.trees.parent
        stuck = [next(shelf.glob(f"{kind}/*/")) / "stuck" for kind in ("trees", "gits", "packs")]
        for directory in stuck:
            directory.mkdir()
        with ExitStack() as mounts:
            for path in (*stuck, next((shelf / "blobs").iterdir())):
                mounts.enter_context(busy(path))
            await store.templates.remove_mirror(NAME)
            left = [
                path for kind in ("trees", "gits", "packs") for path in (shelf / kind).iterdir()
            ]
            assert len(left) == len(stuck)
            assert not await store.trash.retry()
            assert [file for file in (shelf / "blobs").iterdir() if file.stat().st_nlink == 1]
        assert await store.trash.retry()
        await store.templates.evict()
        assert not [path for path in shelf.rglob("*") if path.parent != shelf]

    run(tmp_path, upstream, body)


def test_a_near_template_costs_one_call_for_its_tree_and_index(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those for its closure."""
    upstream = make_upstream("a")
    commits = upstream.history(3)
    called: list[str] = []
    call = Workers.run

    async def counted(self: Workers, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return await call(self, function, *args, **kwargs)

    async def body(store: Store) -> None:
        await store.ensure(commits[1])
        monkeypatch.setattr(Workers, "run", counted)
        near = await store.ensure(commits[2])
        assert sorted(called) == ["build_layer", "pack_increment", "resolve"]
        assert_equals_commit(
            near, tmp_path / "mounted", upstream.git("rev-parse", f"{commits[2]}^{{tree}}")
        )

    run(tmp_path, upstream, body)


def test_a_near_template_makes_few_files(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Files and directories cost more than anything else of a first checkout: whatever adds one has
    to say so here.
    """
    upstream = make_upstream("a")
    first = upstream.commit({f"{number}.txt": f"{number}\n" for number in range(20)})
    upstream.git("tag", "v1", first)
    second = upstream.commit({"7.txt": "seven\n"})

    def inodes(store: Store) -> dict[int, str]:
        """Each with where it was made: `gits` and `blobs` have links of what is elsewhere."""
        kinds = ("blobs", "gits", "packs", "trees")
        return {
            path.lstat().st_ino: kind
            for kind in kinds
            for path in (store.trees.parent / kind).rglob("*")
        }

    async def test(store: Store) -> None:
        await store.ensure(first)
        before = inodes(store)
        await store.ensure(second)
        assert Counter(kind for inode, kind in inodes(store).items() if inode not in before) == {
            "packs": 4,  # directory, pack, index, record
            # directory, .git, info, objects, objects/pack, refs; HEAD, config, packed-refs; record;
            # packs are links
            "gits": 10,
            # directory, files, the one that changed, index, .git, index, manifest, record
            "trees": 8,
        }

    run(tmp_path, upstream, test)


def test_a_delta_makes_each_of_its_directories_once(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files change in them, whatever vanishes from them."""
    upstream = make_upstream("a")
    names = [
        f"{above}/{number}.txt"
        for above in ("deep/one", "deep/two", "flat")
        for number in range(20)
    ]
    first = upstream.commit(dict.fromkeys(names, "one\n" * 2000))
    second = upstream.commit(
        {name: f"{name}\n" if number % 3 else None for number, name in enumerate(names)}
    )
    trees = tmp_path / "store/trees"
    trees.mkdir(parents=True)
    base = build_layer(upstream.path / ".git", first, trees, trees / ".building-1", [])
    (trees / ".building-1").rename(trees / base.name)
    made: list[str] = []
    mkdir = os.mkdir

    def counted(path: Any, *args: Any, **kwargs: Any) -> None:
        made.append(os.fsdecode(path).rpartition("/")[2])
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", counted)
    layer = build_layer(upstream.path / ".git", second, trees, trees / ".building-2", [[base]])
    assert layer.base == base.tree
    assert layer.removed
    assert sorted(name for name in made if name in ("deep", "one", "two", "flat")) == [
        "deep",
        "flat",
        "one",
        "two",
    ]


def test_a_delta_is_built_where_it_has_few_names(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """A link to a file that is there takes no room, but time: a near delta is better than a
    keyframe that needs many.
    """
    upstream = make_upstream("a")
    upstream.commit({f"{number}.txt": f"{number}\n" for number in range(200)})
    second = upstream.commit({f"{number}.txt": f"new {number}\n" for number in range(40)})
    third = upstream.commit({"199.txt": "last\n"})

    async def test(store: Store) -> None:
        first = await store.ensure(upstream.git("rev-parse", f"{second}~1"))
        near = await store.ensure(second)
        template = await store.ensure(third)
        assert template.layers[3:] == near.layers[2:]
        assert near.layers[3:] == first.layers[2:]
        assert [path.name for path in template.layers[2].iterdir()] == ["199.txt"]

    run(tmp_path, upstream, test)


def test_an_unknown_commit_is_said_and_leaves_nothing(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """The error is the caller's; no temporary directory stays."""
    upstream = make_upstream("up")
    upstream.history(1)

    async def test(store: Store) -> None:
        with pytest.raises(CommitNotFoundError):
            await store.ensure("1" * 40)
        assert list((store.state_dir / "templates").rglob("*")) == []

    run(tmp_path, upstream, test)


def test_a_restarted_store_finds_its_templates_and_drops_leftovers(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Whole layers are used again, half-built ones are removed."""
    upstream = make_upstream("up")
    commit = upstream.history(2)[-1]

    async def test(store: Store) -> None:
        await store.ensure(commit)
        leftover = store.trees / ".building-0123"
        leftover.mkdir()
        (store.trees / ("1" * 40)).mkdir()
        again = await store.reopened()
        assert again.find(commit) is None
        await again.ensure(commit)
        assert again.events.counts["template.built"] == 0
        assert [path.name for path in store.trees.iterdir()] == [
            upstream.git("rev-parse", f"{commit}^{{tree}}")
        ]

    run(tmp_path, upstream, test)


def test_a_layer_of_an_earlier_boot_is_proven_again(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """A power failure may have torn it: the damaged file is found and the layer built again."""
    upstream = make_upstream("up")
    commit = upstream.history(2)[-1]

    async def test(store: Store) -> None:
        template = await store.ensure(commit)
        layer = template.layers[-1].parent
        record = layer / "layer.json"
        found = read_record(layer)
        assert found is not None
        assert found[1]
        record.write_text(record.read_text().replace('"boot": "', '"boot": "another'))
        (template.layers[-1] / "README").write_text("numbex 1\n")
        again = await store.reopened()
        rebuilt = await again.ensure(commit)
        assert (rebuilt.layers[-1] / "README").read_text() == "number 1\n"

    run(tmp_path, upstream, test)


def test_a_layer_of_another_version_is_built_again(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """What a former mirrord recorded in another form is not there, and spoils no commit that would
    lie on it.
    """
    upstream = make_upstream("up")
    commits = upstream.history(3)
    tree = upstream.git("rev-parse", f"{commits[2]}^{{tree}}")

    async def test(store: Store) -> None:
        layer = (await store.ensure(commits[0])).layers[-1].parent
        (layer / "manifest").write_bytes(b"mirrord manifest 0\n")
        again = await store.reopened()
        assert_equals_commit(await again.ensure(commits[2]), tmp_path / "mounted", tree)

    run(tmp_path, upstream, test)


@pytest.mark.parametrize("damage", ["content", "extra", "deleted", "whiteout", "mode"])
def test_damage_is_found_and_built_again(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, damage: str
) -> None:
    """A scrub takes the damaged layer and what lies on it out of use; the next asker gets a sound
    one.
    """
    upstream = make_upstream("up")
    first = upstream.commit({f"f{n}": f"{n}\n" * 3000 for n in range(30)})
    second = upstream.commit({"f1": None, "f2": "new"})
    tree = upstream.git("rev-parse", f"{second}^{{tree}}")

    async def test(store: Store) -> None:
        await store.ensure(first)
        template = await store.ensure(second)
        delta, keyframe = template.layers[2:]
        if damage == "content":
            (keyframe / "f3").write_bytes(b"x" * (keyframe / "f3").stat().st_size)
        elif damage == "extra":
            (delta / "extra").touch()
        elif damage == "deleted":
            shutil.rmtree(keyframe.parent)
        elif damage == "whiteout":
            (delta / "f1").unlink()
        else:
            (delta / "f2").chmod(0o755)
        if damage != "deleted":  # which `ensure` sees
            assert await store.templates.scrub() >= 1
        assert_equals_commit(await store.ensure(second), tmp_path / "again", tree)
        assert await store.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_a_damaged_template_that_is_held_leaves_its_checkout_alone(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Its directories are renamed, not emptied, until the checkout is released; the mount stays."""
    upstream = make_upstream("up")
    commit = upstream.commit({"a": "a" * 99, "b": "b"})

    async def test(store: Store) -> None:
        template = await store.ensure(commit)
        store.templates.hold(template)
        with Mounted(template, tmp_path / "held") as root:
            (template.layers[-1] / "b").write_text("B")
            assert await store.templates.scrub() == 1
            rebuilt = await store.ensure(commit)
            assert (rebuilt.layers[-1] / "b").read_text() == "b"
            assert (root / "a").read_text() == "a" * 99
        store.templates.drop(template)
        await store.templates.evict()
        assert len(list(store.trees.iterdir())) == 1

    run(tmp_path, upstream, test)


def test_packs_that_are_being_written_are_not_judged(tmp_path: Path) -> None:
    for place, name in (("packs/.building-a", "pack-1.pack"), ("packs/b", "pack-2.pack")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / name).write_bytes(b"a half")
    assert find_bad_packs(tmp_path) == [tmp_path / "packs/b/pack-2.pack"]


def test_an_altered_closure_pack_is_found_and_built_again(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """With the sealed stores that share its bytes; the next asker gets sound ones."""
    upstream = make_upstream("up")
    commit = upstream.history(4)[-1]

    async def test(store: Store) -> None:
        await store.ensure(commit)
        assert await store.templates.scrub_mirror(NAME) == {}
        pack = next((tmp_path / "state/templates").glob("*/packs/*/pack-*.pack"))
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 0xFF
        pack.chmod(0o644)
        pack.write_bytes(data)
        found = await store.templates.scrub_mirror(NAME)
        assert list(found) == [f"closure pack {pack.name}"]
        assert "builds it again" in found[f"closure pack {pack.name}"]
        again = await store.ensure(commit)
        git = next(path / ".git" for path in again.layers if (path / ".git/objects").is_dir())
        subprocess.run(
            ["git", f"--git-dir={git}", "fsck", "--full", "--strict"],
            env=ENV,
            check=True,
            capture_output=True,
        )
        assert await store.templates.scrub() == 0

    run(tmp_path, upstream, test)
