"""The template store: what is mounted equals the commit, is built once, and survives damage."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from gitrepos import ENV, Upstream, git

from mirrord.checkouts.gitdirs import Gitdirs
from mirrord.checkouts.layer import read_record
from mirrord.checkouts.templates import Template, Templates
from mirrord.config import Settings
from mirrord.errors import CheckoutBusyError, CommitNotFoundError
from mirrord.git.command import Git
from mirrord.git.workers import Workers
from mirrord.jobs.events import Events
from mirrord.model import CommitId, History, MirrorName

NAME = MirrorName("owner", "name")
ME = (os.geteuid(), os.getegid())

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


class Store:
    """A template store over one upstream, as the engine builds it."""

    def __init__(self, state_dir: Path, upstream: Upstream, workers: Workers, template_bytes: str = "50GiB") -> None:
        self.state_dir = state_dir
        self.template_bytes = template_bytes
        self.events = Events()
        home = state_dir / "home"
        home.mkdir(parents=True, exist_ok=True)
        settings = lambda: Settings.model_validate({"checkouts": {"template_bytes": self.template_bytes}})  # noqa: E731
        path = lambda name: upstream.path / ".git"  # noqa: E731
        self.gitdirs = Gitdirs(state_dir=state_dir, git=Git(home=home), workers=workers, mirrors_path=path)
        self.templates = Templates(
            settings=settings,
            state_dir=state_dir,
            workers=workers,
            mirrors_path=path,
            gitdirs=self.gitdirs,
            events=self.events,
        )

    @property
    def trees(self) -> Path:
        return self.state_dir / "templates" / str(NAME) / "trees"

    async def ensure(self, commit: str, history: History = History.SEALED, owner: tuple[int, int] | None = ME) -> Template:
        return await self.templates.ensure(NAME, CommitId(commit), history, owner)

    def find(self, commit: str, owner: tuple[int, int] | None = ME) -> Template | None:
        return self.templates.find(NAME, CommitId(commit), History.SEALED, owner)


def run(tmp_path: Path, upstream: Upstream, test: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        workers = Workers(size=2)
        store = Store(tmp_path / "state", upstream, workers)
        try:
            await store.templates.open()
            await test(store)
        finally:
            await store.templates.close()
            await workers.close()

    anyio.run(main)


class Mounted:
    """A template mounted as a checkout would be."""

    def __init__(self, template: Template, at: Path) -> None:
        self.template, self.at = template, at

    def __enter__(self) -> Path:
        for name in ("upper", "work", "tree"):
            (self.at / name).mkdir(parents=True)
        lower = ":".join(map(str, self.template.layers))
        options = f"lowerdir={lower},upperdir={self.at / 'upper'},workdir={self.at / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.at / "tree"], check=True)
        return self.at / "tree"

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", self.at / "tree"], check=True)


def assert_equals_commit(template: Template, at: Path, tree: str) -> None:
    """git sees a clean tree by stat alone, and its content is the commit's."""
    with Mounted(template, at) as root:
        assert git(root, "diff-files") == ""
        assert git(root, "write-tree") == tree
        assert git(root, "status", "--porcelain", "--ignored") == ""
        assert git(root, "rev-parse", "HEAD") == template.head
        (root / ".git/index").unlink()
        git(root, "add", "--all", "--force")
        for line in git(template.layers[1], "ls-tree", "-r", "HEAD").splitlines():
            if line.startswith("160000"):
                git(root, "update-index", "--add", "--cacheinfo", f"160000,{line.split()[2]},{line.split(chr(9))[1]}")
        assert git(root, "write-tree") == tree


def test_a_keyframe_and_a_delta_show_their_commits(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """The first commit is a whole tree, the next lies on it; both are clean when mounted."""
    upstream = make_upstream("up")
    files = {f"d{n % 9}/f{n}": f"{n}\n" * 50 for n in range(90)}
    first = upstream.commit({**files, "gone/deep/x": "x", "gone/y": "y", "keep/a": "a", "keep/b": "b"})
    second = upstream.commit({"gone/deep/x": None, "gone/y": None, "keep/a": None, "d1/f1": "new\n", "d1/new": "new"})

    async def test(store: Store) -> None:
        a, b = await store.ensure(first), await store.ensure(second)
        assert (len(a.layers), len(b.layers)) == (3, 4)
        assert_equals_commit(a, tmp_path / "a", upstream.git("rev-parse", f"{first}^{{tree}}"))
        assert_equals_commit(b, tmp_path / "b", upstream.git("rev-parse", f"{second}^{{tree}}"))

    run(tmp_path, upstream, test)


def test_every_change_of_kind_works_in_a_chain_of_deltas(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """File, directory, symlink and submodule turn into each other; names are bytes and differ in case only."""
    upstream = make_upstream("up")
    up = upstream.path
    filler = {f"fill/{n}": "filler " * 999 for n in range(90)}
    commits = [upstream.commit({**filler, "a": "file", "b/x/y": "1", "b/z": "2", "c": "file", "Case": "1", "case": "2"})]
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
            assert_equals_commit(template, tmp_path / str(number), upstream.git("rev-parse", f"{commit}^{{tree}}"))
        assert await store.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_a_template_is_built_once_however_many_ask(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
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


def test_an_unknown_commit_is_said_and_leaves_nothing(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """The error is the caller's; no temporary directory stays."""
    upstream = make_upstream("up")
    upstream.history(1)

    async def test(store: Store) -> None:
        with pytest.raises(CommitNotFoundError):
            await store.ensure("1" * 40)
        assert list(store.trees.iterdir()) == []

    run(tmp_path, upstream, test)


def test_a_restarted_store_finds_its_templates_and_drops_leftovers(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """What is whole is used again, what a killed build left is removed."""
    upstream = make_upstream("up")
    commit = upstream.history(2)[-1]

    async def test(store: Store) -> None:
        await store.ensure(commit)
        leftover = store.trees / ".building-0123"
        leftover.mkdir()
        (store.trees / ("1" * 40)).mkdir()
        again = Store(tmp_path / "state", upstream, store.templates._workers)
        await again.templates.open()
        assert again.find(commit) is None
        await again.ensure(commit)
        assert again.events.counts["template.built"] == 0
        assert [path.name for path in store.trees.iterdir()] == [upstream.git("rev-parse", f"{commit}^{{tree}}")]

    run(tmp_path, upstream, test)


def test_what_was_proven_before_the_last_boot_is_proven_again(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
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
        again = Store(tmp_path / "state", upstream, store.templates._workers)
        await again.templates.open()
        rebuilt = await again.ensure(commit)
        assert (rebuilt.layers[-1] / "README").read_text() == "number 1\n"

    run(tmp_path, upstream, test)


@pytest.mark.parametrize("damage", ["content", "extra", "deleted", "whiteout", "mode"])
def test_damage_is_found_and_built_again(make_upstream: Callable[[str], Upstream], tmp_path: Path, damage: str) -> None:
    """A scrub takes the damaged layer and what lies on it out of use; the next asker gets a sound one."""
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
        if damage == "deleted":
            assert store.find(second) is None
        else:
            assert await store.templates.scrub() >= 1
        assert_equals_commit(await store.ensure(second), tmp_path / "again", tree)
        assert await store.templates.scrub() == 0

    run(tmp_path, upstream, test)


def test_the_least_used_goes_first_and_what_is_held_stays(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """Over `template_bytes` only templates that no checkout uses are dropped."""
    upstream = make_upstream("up")
    commits = []
    for name in "abc":
        shutil.rmtree(upstream.path / "src", ignore_errors=True)
        commits.append(upstream.commit({f"src/{name}{n}": os.urandom(5000).hex() for n in range(20)}))

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        store.templates.hold(made[0])
        assert not await store.templates.is_full()
        store.template_bytes = "1B"
        assert await store.templates.is_full()
        assert await store.templates.evict() == 2
        assert [store.find(commit) is not None for commit in commits] == [True, False, False]
        with pytest.raises(CheckoutBusyError):
            await store.templates.forget(NAME)
        store.templates.drop(made[0])
        assert await store.templates.evict() == 1
        assert list(store.trees.iterdir()) == []

    run(tmp_path, upstream, test)


def test_a_damaged_template_that_is_held_leaves_its_checkout_alone(
    make_upstream: Callable[[str], Upstream], tmp_path: Path
) -> None:
    """Its directories are renamed, not emptied, until the checkout lets go; the mount goes on."""
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


def test_each_owner_has_an_index_of_its_own(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """git compares uid and gid, so an index for another owner is another file; the rest is shared."""
    upstream = make_upstream("up")
    commit = upstream.history(1)[-1]

    async def test(store: Store) -> None:
        mine, other = await store.ensure(commit), await store.ensure(commit, owner=(1234, 1234))
        bare = await store.ensure(commit, owner=None)
        assert mine.layers[1:] == other.layers[1:] == bare.layers
        index = subprocess.run(
            ["git", "ls-files", "--debug", "README"],
            env={**ENV, "GIT_INDEX_FILE": str(other.layers[0] / ".git/index")},
            cwd=upstream.path,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        assert "uid: 1234" in index

    run(tmp_path, upstream, test)


def test_a_file_of_several_layers_is_on_disk_once(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """What comes back in a later commit is a link, git still sees clean trees, and it goes with the last layer that has it."""
    upstream = make_upstream("up")
    commits = [upstream.commit({f"d{n % 3}/f{n}": os.urandom(9999).hex() for n in range(30)})]
    text = os.urandom(9999).hex()
    for turn in range(4):
        commits.append(upstream.commit({"d0/back": text if turn % 2 == 0 else None, f"d1/new{turn}": f"{turn}"}))
    trees = [upstream.git("rev-parse", f"{commit}^{{tree}}") for commit in commits]

    async def test(store: Store) -> None:
        made = [await store.ensure(commit) for commit in commits]
        copies = list(store.trees.glob("*@*/files/d0/back"))
        assert len(copies) > 1
        assert {copy.stat().st_ino for copy in copies} == {copies[0].stat().st_ino}
        blobs = store.trees.parent / "blobs"
        assert sum(len(text) == blob.stat().st_size for blob in blobs.iterdir()) == 1
        for number, (template, tree) in enumerate(zip(made, trees, strict=True)):
            assert_equals_commit(template, tmp_path / str(number), tree)
        assert store.templates.size_bytes() <= _disk_bytes(store.trees) + _disk_bytes(store.trees.parent / "indexes")
        store.template_bytes = "1B"
        assert await store.templates.evict() == len(commits)
        assert list(blobs.iterdir()) == []
        assert store.templates.size_bytes() == 0

    run(tmp_path, upstream, test)


def _disk_bytes(directory: Path) -> int:
    return int(subprocess.run(["du", "-sB1", directory], capture_output=True, check=True, text=True).stdout.split()[0])


@pytest.mark.parametrize("damage", ["bytes", "mode"])
def test_a_shared_file_that_is_damaged_is_lent_to_nobody(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, damage: str
) -> None:
    """Its bytes are hashed before a layer gets it: the layer is sound, the next one shares the new file."""
    upstream = make_upstream("up")
    first = upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})
    second = upstream.commit({"shared": "same " * 999})
    third = upstream.commit({"shared": None, "d1/shared": "same " * 999})
    tree = upstream.git("rev-parse", f"{third}^{{tree}}")

    async def test(store: Store) -> None:
        await store.ensure(first)
        await store.ensure(second)
        (copy,) = store.trees.glob("*@*/files/shared")
        if damage == "bytes":
            copy.write_text("SAME " * 999)
        else:
            copy.chmod(0o600)
        template = await store.ensure(third)
        (sound,) = store.trees.glob("*@*/files/d1/shared")
        assert sound.stat().st_ino != copy.stat().st_ino
        assert_equals_commit(template, tmp_path / "third", tree)

    run(tmp_path, upstream, test)


def test_shared_files_that_no_layer_has_go(make_upstream: Callable[[str], Upstream], tmp_path: Path) -> None:
    """A killed build leaves them; the next daemon removes them when it sees what there is."""
    upstream = make_upstream("up")
    first = upstream.commit({f"d{n}/f": os.urandom(9999).hex() for n in range(30)})
    second = upstream.commit({"shared": "same " * 999})

    async def test(store: Store) -> None:
        await store.ensure(first)
        await store.ensure(second)
        blobs = store.trees.parent / "blobs"
        kept = {blob.name for blob in blobs.iterdir()}
        (blobs / f"{'1' * 40}.644").write_text("left")
        again = Store(tmp_path / "state", upstream, store.templates._workers)
        await again.templates.open()
        assert not await again.templates.is_full()
        assert {blob.name for blob in blobs.iterdir()} == kept
        assert again.templates.size_bytes() == store.templates.size_bytes()

    run(tmp_path, upstream, test)
