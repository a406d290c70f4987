"""Upstream does its worst, over real HTTP: every recorded commit is still there, whole, pinned, and checked out right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import misfortunes
from forge import serving
from gitrepos import Upstream, git

from .judge import judge, must_be_whole
from .lab import Lab, Refused, laboratory
from .plan import Plan, told
from .report import Row

_FAULT = "upstream does its worst"


class Misfortune(NamedTuple):
    """What happens, and what a sync then answers: `followed`, or the code of its error."""

    name: str
    happen: misfortunes.Misfortune
    answer: str = "followed"


MISFORTUNES = (
    Misfortune("force push", misfortunes.force_push),
    Misfortune("branches and a tag deleted", misfortunes.delete_some),
    Misfortune("branch `a` renamed to `a/b`", misfortunes.rename_to_directory),
    Misfortune("repository renamed, with a redirect", misfortunes.redirect),
    Misfortune("replaced by another project of the same name", misfortunes.another_project),
    Misfortune("history with broken objects", misfortunes.break_objects),
    Misfortune("pack bomb: 64 MiB in as many KiB", misfortunes.add_bomb),
    Misfortune("repository deleted", misfortunes.delete_repository, "upstream-not-found"),
    Misfortune("repository made private", misfortunes.make_private, "upstream-auth"),
    Misfortune("repository emptied", misfortunes.empty, "upstream-empty"),
    Misfortune("most refs vanish at once", misfortunes.most_refs_vanish, "upstream-loss"),
)


def rows(_: Plan) -> Iterator[Row]:
    """A row for each; all on one daemon, each with an upstream of its own."""
    with laboratory() as lab:
        model = Upstream(lab.root / "model")
        misfortunes.furnish(model)
        (lab.root / "forge").mkdir()
        for misfortune in MISFORTUNES:
            yield told(_FAULT, "sync", misfortune.name, partial(befall, lab, model, misfortune))


def befall(lab: Lab, model: Upstream, misfortune: Misfortune) -> Row:
    """A mirror with recorded commits; its upstream's misfortune; two syncs; and all of it must be there."""
    short = f"worst{lab.number()}"
    name = f"o__{short}"
    path = lab.root / "forge" / name
    shutil.copytree(model.path, path)
    commits = sorted(
        set(model.git("for-each-ref", "--format=%(objectname)", "refs/heads").splitlines())
    )
    with serving(path.parent) as forge:
        lab.finish(
            lab.call("POST", "mirrors", {"repo": f"o/{short}", "url": f"{forge.url}/{name}/.git"})
        )
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
    how = (
        "followed, what it left is kept"
        if answer == "followed"
        else f"answered {answer}, changed nothing"
    )
    return f"{how}; every recorded commit is served"


def _is_served(lab: Lab, name: str, commits: list[str], model: Upstream) -> None:
    pinned = {pin["commit"] for pin in lab.call("GET", "pins") if pin["mirror"] == name}
    assert pinned == set(commits), f"lost pins: {set(commits) - pinned}"
    must_be_whole(lab.state / "mirrors" / name, commits)
    audit = lab.finish(
        lab.call("POST", "audits", {"mirrors": [name], "level": "content", "heal": False})
    )
    assert audit["counts"] == {**audit["counts"], "ok": len(commits)}, audit["counts"]
    for commit in commits[:2]:
        made = lab.call("POST", "checkouts", {"mirror": name, "commit": commit})
        assert git(Path(made["path"]), "write-tree") == model.git(
            "rev-parse", f"{commit}^{{tree}}"
        ), "a wrong tree"
        lab.call("DELETE", f"checkouts/{made['id']}")
    judge(lab)
