"""What happens to upstreams, each a function of the repository and the forge it is on; and a repository it can happen to."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from forge import Forge
from gitrepos import Upstream, git

BRANCHES = 30
_LARGE_BYTES = 64 * 1024**2

Misfortune = Callable[[Upstream, Forge], None]


def furnish(upstream: Upstream) -> None:
    """Branches of their own, a tag nobody else reaches, a branch that is a name and not yet a directory."""
    upstream.history(3)
    for n in range(BRANCHES):
        upstream.git("checkout", "--quiet", "-b", f"topic{n}", "main")
        upstream.commit({f"topic{n}": f"{n}"})
    upstream.git("tag", "-a", "v1", "-m", "one")
    upstream.git("checkout", "--quiet", "main")


# -- what a mirror follows --------------------------------------------------------------------------------------------


def force_push(upstream: Upstream, _: Forge) -> None:
    upstream.git("reset", "--quiet", "--hard", "main~2")
    upstream.commit({"rewritten": "1"})


def delete_some(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-D", *(f"topic{n}" for n in range(8)))
    upstream.git("tag", "-d", "v1")


def rename_to_directory(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-m", "topic1", "moving")
    upstream.git("branch", "-m", "moving", "topic1/a")


def redirect(upstream: Upstream, forge: Forge) -> None:
    upstream.path.rename(upstream.path.with_name(f"{upstream.path.name}-new"))
    forge.renamed = {f"/{upstream.path.name}/": f"/{upstream.path.name}-new/"}


def another_project(upstream: Upstream, _: Forge) -> None:
    """Of the same name, with branches of the same names."""
    shutil.rmtree(upstream.path)
    other = Upstream(upstream.path)
    for n in range(BRANCHES):
        other.git("checkout", "--quiet", "--orphan", f"topic{n}")
        other.commit({"README": f"another project {n}"})
    other.git("checkout", "--quiet", "--orphan", "main")
    other.commit({"README": "another project"})


def break_objects(upstream: Upstream, _: Forge) -> None:
    """A branch with a commit that strict fsck refuses."""
    raw = upstream.git("cat-file", "commit", "main").replace("author A U Thor", "author  A\0U")
    bad = upstream.git(
        "hash-object",
        "-t",
        "commit",
        "-w",
        "--stdin",
        "--literally",
        stdin=f"tree {'0' * 40}\n{raw}".encode(),
    )
    upstream.path.joinpath(".git/refs/heads/bad").write_text(f"{bad}\n")


def add_bomb(upstream: Upstream, _: Forge) -> None:
    """64 MiB in as many KiB."""
    with (upstream.path / "bomb").open("wb") as file:
        file.truncate(_LARGE_BYTES)
    upstream.commit({})


# -- what it does not -------------------------------------------------------------------------------------------------


def delete_repository(upstream: Upstream, _: Forge) -> None:
    shutil.rmtree(upstream.path)


def make_private(_: Upstream, forge: Forge) -> None:
    forge.password = "secret"


def empty(upstream: Upstream, _: Forge) -> None:
    shutil.rmtree(upstream.path)
    git(upstream.path.parent, "init", "--quiet", str(upstream.path))


def most_refs_vanish(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-D", *(f"topic{n}" for n in range(BRANCHES - 1)))


def all_branches_vanish(upstream: Upstream, _: Forge) -> None:
    upstream.git("checkout", "--quiet", "--detach")
    upstream.git("branch", "-D", "main", *(f"topic{n}" for n in range(BRANCHES)))
