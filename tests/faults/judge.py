"""After a fault: is everything there that was promised, and nothing that was not?

Each check raises AssertionError with what is wrong. git, plain reads of the disk, and the daemon's own audit are asked; the three
must agree with the lab's truth.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gitrepos import git

from .lab import NAME, Lab, Refused, refs_of

_LEFTOVER = re.compile(
    r"(tmp_(pack|idx|rev|obj|midx|graph|bitmap)_\w+|packed-refs\.new|(refs|packs)_\w{6}|\.tmp-.*|.*\.lock|gc\.pid|mirrord-transaction(\.new)?|lease\.json\.new"
    r"|layer\.json\.new|\.building.*|\.trash-.*|dataset-.*|upload-.*)"
)
_SETTLE_S = 30.0


def judge(lab: Lab, *, level: str = "closure") -> None:
    """Everything that must hold at any time when no request is at work."""
    nothing_left(lab)
    for mirror in sorted((lab.state / "mirrors").iterdir()):
        git(mirror, "fsck", "--full", "--strict", "--no-dangling")
    nothing_lost(lab)
    leases_stand(lab)
    audit_is_clean(lab, level)


def nothing_left(lab: Lab) -> None:
    """No lock, no temporary file, no half directory; the background may take a moment for what was released."""
    until_empty(lambda: leftovers(lab.state), "left behind")


def leftovers(state: Path) -> list[str]:
    """What should not be in a state directory when nothing is going on. Clients' trees are not looked into."""
    found = [
        f"quarantine/{path.name}"
        for path in (state / "quarantine").iterdir()
        if path.name != "damaged"
    ]
    for directory, names, files in os.walk(state):
        if Path(directory).parent.parent in (state / "checkouts", state / "leases"):
            names.clear()
            continue
        wrong = [
            name for name in (*names, *files) if _LEFTOVER.fullmatch(name) and name != "daemon.lock"
        ]
        found += [str((Path(directory) / name).relative_to(state)) for name in wrong]
    leases = [*state.glob("leases/*/lease.json"), *state.glob("leases/*/resetting.json")]
    leases += state.glob("templates/.layers/*.json")
    named = "".join(path.read_text() for path in leases)
    layers = (path.name for path in state.glob("templates/.layers/*"))
    found += [f"layer {name} without a lease" for name in layers if name[:16] not in named]
    for kind in ("checkouts", "leases"):
        names = [
            path.name for path in (state / kind).iterdir() if not path.name.startswith(".warm-")
        ]
        found += [f"{kind}/{name} without a lease" for name in names if not _is_leased(state, name)]
    return found


def _is_leased(state: Path, checkout: str) -> bool:
    return any(
        (state / "leases" / checkout / name).exists() for name in ("lease.json", "resetting.json")
    )


def until_empty(look: Callable[[], list[str]], what: str) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            found = look()
        except FileNotFoundError:  # it went while we looked
            continue
        if not found:
            return
        assert time.monotonic() < deadline, f"{what}: {found[:5]}"
        time.sleep(0.05)


def nothing_lost(lab: Lab) -> None:
    """Every pin and every tip that was ever there is there, whole; catalog and refs say the same."""
    refs = refs_of(lab.mirror)
    pinned = {
        (pin["commit"], pin["owner"]) for pin in lab.call("GET", "pins") if pin["mirror"] == NAME
    }
    in_git = {
        (oid, ref.split("/", 3)[3].rpartition("/")[0])
        for ref, oid in refs.items()
        if ref.startswith("refs/mirrord/pins/")
    }
    assert pinned == in_git, f"catalog and refs disagree on pins: {pinned ^ in_git}"
    assert lab.truth.pins <= pinned, f"lost pins: {lab.truth.pins - pinned}"
    wanted = sorted({commit for commit, _ in lab.truth.pins} | lab.truth.tips)
    must_be_whole(lab.mirror, wanted)
    reachable = git(lab.mirror, "rev-list", "--all").split()
    assert lab.truth.tips <= {*reachable}, (
        f"tips that no ref keeps: {lab.truth.tips - {*reachable}}"
    )


def must_be_whole(repository: Path, commits: list[str]) -> None:
    """Every object is there and hashes to its name, whatever a commit-graph says."""
    git(
        repository, "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", "--stdin",
        stdin="\n".join(commits).encode(),
    )  # fmt: skip


def leases_stand(lab: Lab) -> None:
    """A lease that was answered stands, with its owner's work; one that is listed can be used."""
    listed = {lease["id"]: lease for lease in lab.call("GET", "checkouts")}
    lost = set(lab.truth.leases) - set(listed)
    assert not lost, f"lost leases: {lost}"
    for lease in listed.values():
        must_be_usable(lab, lease)


def must_be_usable(lab: Lab, lease: dict[str, Any]) -> None:
    """Its tree is the commit's but for what its owner wrote."""
    tree = Path(lease["path"])
    stands = lab.state / "leases" / lease["id"] / "lease.json"
    until_empty(lambda: [] if stands.exists() else [lease["id"]], "not reset again by the start")
    assert git(tree, "rev-parse", "HEAD") == lease["commit"], f"HEAD of {lease['id']}"
    assert git(tree, "rev-parse", "HEAD^{tree}") == lease["tree"], f"tree of {lease['id']}"
    status = git(tree, "status", "--porcelain", "--ignored").splitlines()
    assert set(status) <= {"?? work"}, (
        f"checkout {lease['id']} ({lease['backend']}) is not as it was made: {status[:5]}"
    )
    git(tree, "fsck", "--full", "--no-dangling")


def audit_is_clean(lab: Lab, level: str) -> None:
    audit = lab.finish(lab.call("POST", "audits", {"level": level, "heal": False}))
    bad = {state: count for state, count in audit["counts"].items() if count and state != "ok"}
    assert not bad, f"the audit finds {bad}: {audit['findings'][:3]}"
    assert not audit["findings"], audit["findings"][:3]


def works_again(lab: Lab) -> None:
    """A sync that has something to do, and a checkout of what it brought by each backend."""
    new = lab.upstream.commit({"README": f"again {lab.number()}\n"})
    lab.sync()
    refs = refs_of(lab.mirror, "refs/heads", "refs/tags")
    assert refs == lab.offered(), "a sync brought the wrong refs"
    for backend in ("overlay", "pool"):
        try:
            made = lab.checkout(new, backend)
        except Refused as refused:
            if refused.code == "backend-unavailable":
                continue
            raise
        assert git(Path(made["path"]), "write-tree") == git(
            lab.upstream.path, "rev-parse", f"{new}^{{tree}}"
        )
        lab.release(made["id"])


def no_process_left(pids: set[int]) -> None:
    """The children of a killed daemon end soon."""
    until_empty(lambda: [str(pid) for pid in pids if _is_ours_alive(pid)], "processes left")


def _is_ours_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
