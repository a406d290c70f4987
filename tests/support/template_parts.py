"""A template store over one upstream, as the engine builds it, and what is mounted of it compared with git."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from gitrepos import Upstream, git

from mirrord.config import Settings
from mirrord.git.command import Git
from mirrord.host.trash import Trash
from mirrord.jobs.events import Events
from mirrord.model import CommitId, History, MirrorName
from mirrord.templates.builder import StoreBuilder
from mirrord.templates.service import Template, Templates
from mirrord.workers.pool import Workers

NAME = MirrorName("owner", "name")


class Store:
    """A template store over one upstream, as the engine builds it."""

    def __init__(
        self, state_dir: Path, upstream: Upstream, workers: Workers, template_bytes: str = "50GiB"
    ) -> None:
        self.state_dir = state_dir
        self._upstream, self._workers = upstream, workers
        self.template_bytes = template_bytes
        self.ttl = "7d"
        self.named: set[CommitId] = set()
        self.events = Events()
        self.trash = Trash()
        home = state_dir / "home"
        home.mkdir(parents=True, exist_ok=True)

        def settings() -> Settings:
            checkouts = {"template_bytes": self.template_bytes, "ttl": self.ttl}
            return Settings.model_validate({"checkouts": checkouts})

        async def recorded(name: MirrorName) -> set[CommitId]:
            return self.named

        def path(name: MirrorName) -> Path:
            return upstream.path / ".git"

        self.stores = StoreBuilder(
            state_dir=state_dir,
            git=Git(home=home),
            workers=workers,
            mirrors_path=path,
            trash=self.trash,
            recorded=recorded,
        )
        self.templates = Templates(
            settings=settings,
            state_dir=state_dir,
            workers=workers,
            mirrors_path=path,
            stores=self.stores,
            events=self.events,
            trash=self.trash,
        )

    async def reopened(self) -> Store:
        """The same directory, as the next daemon finds it."""
        again = Store(self.state_dir, self._upstream, self._workers)
        await again.templates.open()
        return again

    @property
    def trees(self) -> Path:
        return self.state_dir / "templates" / str(NAME) / "trees"

    async def ensure(self, commit: str, history: History = History.SEALED) -> Template:
        return await self.templates.ensure(NAME, CommitId(commit), history)

    def find(self, commit: str) -> Template | None:
        return self.templates.find(NAME, CommitId(commit), History.SEALED)


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
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, self.at / "tree"], check=True
        )
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
                git(
                    root,
                    "update-index",
                    "--add",
                    "--cacheinfo",
                    f"160000,{line.split()[2]},{line.split(chr(9))[1]}",
                )
        assert git(root, "write-tree") == tree


def disk_bytes(directory: Path) -> int:
    return int(
        subprocess.run(
            ["du", "-sB1", directory], capture_output=True, check=True, text=True
        ).stdout.split()[0]
    )
