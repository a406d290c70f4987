"""Upstream does its worst, over real HTTP: every recorded commit is still there, whole, pinned, and checked out right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from forge import Forge, serving
from gitrepos import Upstream, git

from .judge import judge, must_be_whole
from .lab import Lab, Refused, laboratory
from .plan import Plan, told
from .report import Row

_FAULT = "upstream does its worst"
_BRANCHES = 30
_LARGE_BYTES = 64 * 1024**2


def _force_push(upstream: Upstream, _: Forge) -> None:
    upstream.git("reset", "--quiet", "--hard", "main~2")
    upstream.commit({"rewritten": "1"})


def _delete_some(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-D", *(f"topic{n}" for n in range(8)))
    upstream.git("tag", "-d", "v1")


def _rename_to_directory(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-m", "topic1", "moving")
    upstream.git("branch", "-m", "moving", "topic1/a")


def _redirect(upstream: Upstream, forge: Forge) -> None:
    upstream.path.rename(upstream.path.with_name(f"{upstream.path.name}-new"))
    forge.renamed = {f"/{upstream.path.name}/": f"/{upstream.path.name}-new/"}


def _another_project(upstream: Upstream, _: Forge) -> None:
    shutil.rmtree(upstream.path)
    other = Upstream(upstream.path)
    for n in range(_BRANCHES):
        other.git("checkout", "--quiet", "--orphan", f"topic{n}")
        other.commit({"README": f"another project {n}"})
    other.git("checkout", "--quiet", "--orphan", "main")
    other.commit({"README": "another project"})


def _break_objects(upstream: Upstream, _: Forge) -> None:
    raw = upstream.git("cat-file", "commit", "main").replace("author A U Thor", "author  A\0U")
    bad = upstream.git("hash-object", "-t", "commit", "-w", "--stdin", "--literally", stdin=f"tree {'0' * 40}\n{raw}".encode())
    upstream.path.joinpath(".git/refs/heads/bad").write_text(f"{bad}\n")


def _add_bomb(upstream: Upstream, _: Forge) -> None:
    with (upstream.path / "bomb").open("wb") as file:
        file.truncate(_LARGE_BYTES)
    upstream.commit({})


def _delete(upstream: Upstream, _: Forge) -> None:
    shutil.rmtree(upstream.path)


def _make_private(_: Upstream, forge: Forge) -> None:
    forge.password = "secret"


def _empty(upstream: Upstream, _: Forge) -> None:
    shutil.rmtree(upstream.path)
    git(upstream.path.parent, "init", "--quiet", str(upstream.path))


def _most_refs_vanish(upstream: Upstream, _: Forge) -> None:
    upstream.git("branch", "-D", *(f"topic{n}" for n in range(_BRANCHES - 1)))


class Misfortune(NamedTuple):
    """What happens, and what a sync then answers: `followed`, or the code of its error."""

    name: str
    happen: Callable[[Upstream, Forge], None]
    answer: str = "followed"


MISFORTUNES = (
    Misfortune("force push", _force_push),
    Misfortune("branches and a tag deleted", _delete_some),
    Misfortune("branch `a` renamed to `a/b`", _rename_to_directory),
    Misfortune("repository renamed, with a redirect", _redirect),
    Misfortune("replaced by another project of the same name", _another_project),
    Misfortune("history with broken objects", _break_objects),
    Misfortune("pack bomb: 64 MiB in as many KiB", _add_bomb),
    Misfortune("repository deleted", _delete, "upstream-not-found"),
    Misfortune("repository made private", _make_private, "upstream-auth"),
    Misfortune("repository emptied", _empty, "upstream-empty"),
    Misfortune("most refs vanish at once", _most_refs_vanish, "upstream-loss"),
)


def rows(_: Plan) -> Iterator[Row]:
    """A row for each; all on one daemon, each with an upstream of its own."""
    with laboratory() as lab:
        model = _model(lab.root / "model")
        (lab.root / "forge").mkdir()
        for misfortune in MISFORTUNES:
            yield told(_FAULT, "sync", misfortune.name, partial(befall, lab, model, misfortune))


def _model(path: Path) -> Upstream:
    made = Upstream(path)
    made.history(3)
    for n in range(_BRANCHES):
        made.git("checkout", "--quiet", "-b", f"topic{n}", "main")
        made.commit({f"topic{n}": f"{n}"})
    made.git("tag", "-a", "v1", "-m", "one")
    made.git("checkout", "--quiet", "main")
    return made


def befall(lab: Lab, model: Upstream, misfortune: Misfortune) -> Row:
    """A mirror with recorded commits; its upstream's misfortune; two syncs; and all of it must be there."""
    short = f"worst{lab.number()}"
    name = f"o__{short}"
    path = lab.root / "forge" / name
    shutil.copytree(model.path, path)
    commits = sorted(set(model.git("for-each-ref", "--format=%(objectname)", "refs/heads").splitlines()))
    with serving(path.parent) as forge:
        lab.finish(lab.call("POST", "mirrors", {"repo": f"o/{short}", "url": f"{forge.url}/{name}/.git"}))
        lab.import_rows(short, commits, repo=f"o/{short}")
        misfortune.happen(_standing(path), forge)
        answers = {_sync(lab, name) for _ in range(2)}
    assert answers == {misfortune.answer}, f"answered {answers}"
    _is_served(lab, name, commits, model)
    return Row(_FAULT, "sync", misfortune.name, _told(misfortune.answer))


def _standing(path: Path) -> Upstream:
    """An upstream that is there already."""
    made = Upstream.__new__(Upstream)
    made.__dict__.update(path=path, _clock=1_700_000_000)
    return made


def _sync(lab: Lab, name: str) -> str:
    try:
        lab.finish(lab.call("POST", f"mirrors/{name}/sync"))
    except Refused as refused:
        return refused.code
    return "followed"


def _told(answer: str) -> str:
    how = "followed, what it left is kept" if answer == "followed" else f"answered {answer}, changed nothing"
    return f"{how}; every recorded commit is served"


def _is_served(lab: Lab, name: str, commits: list[str], model: Upstream) -> None:
    pinned = {pin["commit"] for pin in lab.call("GET", "pins") if pin["mirror"] == name}
    assert pinned == set(commits), f"lost pins: {set(commits) - pinned}"
    must_be_whole(lab.state / "mirrors" / name, commits)
    audit = lab.finish(lab.call("POST", "audits", {"mirrors": [name], "level": "content", "heal": False}))
    assert audit["counts"] == {**audit["counts"], "ok": len(commits)}, audit["counts"]
    for commit in commits[:2]:
        made = lab.call("POST", "checkouts", {"mirror": name, "commit": commit})
        assert git(Path(made["path"]), "write-tree") == model.git("rev-parse", f"{commit}^{{tree}}"), "a wrong tree"
        lab.call("DELETE", f"checkouts/{made['id']}")
    judge(lab)
