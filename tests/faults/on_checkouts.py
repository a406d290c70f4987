"""Work on checkouts as operations, by either backend: templates, checkouts, resets, releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gitrepos import git

from .judge import must_be_usable
from .lab import NAME, Lab
from .operation import AFTER, BEFORE, HALF, Operation


class Checkout(Operation):
    """Of a commit that nobody asked for yet, so its template is built. Whoever was not answered may have a lease that expires."""

    name = "template build"
    backend = "overlay"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.commit = lab.upstream.commit(
            {f"src/mod{lab.number() % 5}.py": f"made = {lab.number()}\n"}
        )
        lab.sync()
        self._before = {lease["id"] for lease in lab.call("GET", "checkouts")}

    def run(self) -> None:
        self.lab.checkout(self.commit, self.backend)

    def outcome(self) -> str:
        return AFTER if self._made() else BEFORE

    def _made(self) -> list[dict[str, Any]]:
        made = [
            lease for lease in self.lab.call("GET", "checkouts") if lease["id"] not in self._before
        ]
        for lease in made:
            assert lease["commit"] == self.commit
            must_be_usable(self.lab, lease)
            tree = git(Path(lease["path"]), "write-tree")
            assert tree == git(self.lab.upstream.path, "rev-parse", f"{self.commit}^{{tree}}")
        return made

    def clean(self) -> None:
        for lease in self._made():
            self.lab.release(lease["id"])


class WarmCheckout(Checkout):
    name = "checkout (overlay)"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.release(lab.checkout(self.commit, self.backend)["id"])


class PoolCheckout(WarmCheckout):
    name = "checkout (pool)"
    backend = "pool"


class PoolTree(Checkout):
    """Of a commit that nobody asked for yet, with no spare to start from: its tree is written."""

    name = "tree creation (pool)"
    backend = "pool"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.call("POST", "gc", {})


class Reset(Operation):
    """A dirty checkout goes on to another commit."""

    name = "reset (overlay)"
    backend = "overlay"
    after_kill = frozenset({BEFORE, AFTER, HALF})

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._from, self._to = lab.commits[1], lab.commits[3 + lab.number() % 3]
        self._lease = lab.checkout(self._from, self.backend)
        tree = Path(self._lease["path"])
        (tree / "README").write_text("dirty\n")
        (tree / "src/extra").mkdir()
        (tree / ".git/config").write_text("[core]\n\tbare = true\n")
        lab.truth.leases.pop(self._lease["id"])

    def run(self) -> None:
        self.lab.call("POST", f"checkouts/{self._lease['id']}/reset", {"commit": self._to})

    def outcome(self) -> str:
        lease = self.lab.call("GET", f"checkouts/{self._lease['id']}")
        tree = Path(lease["path"])
        if (self.lab.state / "leases" / lease["id"] / "resetting.json").exists():
            return HALF
        if lease["commit"] == self._from:
            assert (tree / "README").read_text() == "dirty\n", (
                "neither as its owner left it nor reset"
            )
            return BEFORE
        assert lease["commit"] == self._to
        return AFTER

    def is_sound(self, outcome: str) -> bool:
        """Until it is reset its tree is as its owner left it, or neither; then nothing but a reset is done with it."""
        return outcome == AFTER

    def settle(self) -> None:
        self.run()  # waits for the reset that a start took up again
        assert self.outcome() == AFTER
        must_be_usable(self.lab, self.lab.call("GET", f"checkouts/{self._lease['id']}"))

    def clean(self) -> None:
        self.lab.release(self._lease["id"])


class PoolReset(Reset):
    name = "reset (pool)"
    backend = "pool"


class Snapshot(Operation):
    """Of a checkout with work in it."""

    name = "snapshot"
    backend = "overlay"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._lease = lab.checkout(lab.commits[2], self.backend)
        self._work = Path(self._lease["path"]) / "work"
        self._work.write_text("one\n")

    def run(self) -> None:
        self.lab.call("POST", self._at("snapshots"), {"name": "kept"})

    def _at(self, what: str) -> str:
        return f"checkouts/{self._lease['id']}/{what}"

    def outcome(self) -> str:
        must_be_usable(self.lab, self._lease)
        names = [each["name"] for each in self.lab.call("GET", self._at("snapshots"))]
        assert names in ([], ["kept"])
        return AFTER if names else BEFORE

    def settle(self) -> None:
        super().settle()
        self._work.write_text("two\n")
        self.lab.call("POST", self._at("reset"), {"to": "kept"})
        assert self._work.read_text() == "one\n"

    def clean(self) -> None:
        self.lab.release(self._lease["id"])


class Save(Snapshot):
    """Of a checkout with work in it, which git would record."""

    name = "save"

    def run(self) -> None:
        self.lab.call("POST", self._at("layers"), {"name": "kept"})

    def outcome(self) -> str:
        must_be_usable(self.lab, self._lease)
        return AFTER if self._made() else BEFORE

    def _made(self) -> list[str]:
        return [each["id"] for each in self.lab.call("GET", "layers")]

    def settle(self) -> None:
        if self.outcome() != AFTER:
            self.run()
        wanted = {"mirror": NAME, "commit": self.lab.commits[2], "layer": "kept"}
        for backend in ("overlay", "pool"):
            on_it = self.lab.call("POST", "checkouts", {**wanted, "backend": backend})
            assert (Path(on_it["path"]) / "work").read_text() == "one\n"
            _, _, patch = self.lab.daemon.request("GET", f"/v1/checkouts/{on_it['id']}/diff")
            assert patch == b"", "the layer's work is in the patch"
            self.lab.release(on_it["id"])

    def clean(self) -> None:
        super().clean()
        for layer in self._made():
            self.lab.call("DELETE", f"layers/{layer}")


class EnvironmentReset(Operation):
    """Of a checkout whose environment was changed too: both are as they were, or both are new."""

    name = "reset (environment)"
    after_kill = frozenset({BEFORE, AFTER, HALF})

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._lease = lab.checkout(lab.commits[2], "overlay", environment=_environment(lab))
        self._places = [Path(self._lease["directory"]) / at for at in ("tree", "environment")]
        for place in self._places:
            (place / "work").write_text("one\n")

    def run(self) -> None:
        self.lab.call("POST", f"checkouts/{self._lease['id']}/reset", {})

    def outcome(self) -> str:
        if (self.lab.state / "leases" / self._lease["id"] / "resetting.json").exists():
            return HALF
        must_be_usable(self.lab, self._lease)
        assert (self._places[1] / "bin/python").read_text() == "built\n"
        dirty = [(place / "work").exists() for place in self._places]
        assert len(set(dirty)) == 1, "one was reset and the other was not"
        return BEFORE if any(dirty) else AFTER

    def is_sound(self, outcome: str) -> bool:
        return outcome != HALF

    def settle(self) -> None:
        self.run()  # waits for the reset that a start took up again
        assert self.outcome() == AFTER

    def clean(self) -> None:
        self.lab.release(self._lease["id"])


def _environment(lab: Lab) -> str:
    """One that is ready on disk; a start finds it."""
    digest = "a" * 64
    path = lab.state / "templates/.environments" / digest
    if not path.exists():
        (path / "files/bin").mkdir(parents=True)
        (path / "files/bin/python").write_text("built\n")
        facts = {"key": "built", "digest": digest, "state": "ready", "at": 0}
        (path / "environment.json").write_text(json.dumps(facts))
        lab.kill()
        lab.restart()
    return "built"


class RollBack(Snapshot):
    name = "roll-back (overlay)"
    after_kill = frozenset({BEFORE, AFTER, HALF})

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        super().run()
        self._work.write_text("two\n")

    def run(self) -> None:
        self.lab.call("POST", self._at("reset"), {"to": "kept"})

    def outcome(self) -> str:
        if (self.lab.state / "leases" / self._lease["id"] / "resetting.json").exists():
            return HALF
        text = self._work.read_text()
        assert text in ("one\n", "two\n")
        return AFTER if text == "one\n" else BEFORE

    def is_sound(self, outcome: str) -> bool:
        return outcome != HALF

    def settle(self) -> None:
        self.run()  # waits for the reset that a start took up again
        assert self.outcome() == AFTER


class PoolRollBack(RollBack):
    name = "roll-back (pool)"
    backend = "pool"


class Fork(Operation):
    """Of a checkout with work in it. Whoever was not answered may have a lease that expires."""

    name = "fork (overlay)"
    backend = "overlay"
    verb = "fork"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._parent = lab.checkout(lab.commits[2], self.backend)
        (Path(self._parent["path"]) / "work").write_text("one\n")

    def run(self) -> None:
        self.lab.call("POST", f"checkouts/{self._parent['id']}/{self.verb}", {})

    def outcome(self) -> str:
        must_be_usable(self.lab, self._parent)
        return AFTER if self._made() else BEFORE

    def _made(self) -> list[str]:
        listed = self.lab.call("GET", "checkouts")
        made = [lease for lease in listed if lease["parent"] == self._parent["id"]]
        for lease in made:
            must_be_usable(self.lab, lease)
            assert (Path(lease["path"]) / "work").read_text() == "one\n"
        return [lease["id"] for lease in made]

    def clean(self) -> None:
        for lease in (*self._made(), self._parent["id"]):
            self.lab.release(lease)


class PoolFork(Fork):
    name = "fork (pool)"
    backend = "pool"


class Grade(Fork):
    name = "grade (overlay)"
    verb = "grade"


class Release(Operation):
    name = "release (overlay)"
    backend = "overlay"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._lease = lab.checkout(lab.commits[2], self.backend)

    def run(self) -> None:
        self.lab.release(self._lease["id"])

    def outcome(self) -> str:
        if self._lease["id"] in {lease["id"] for lease in self.lab.call("GET", "checkouts")}:
            must_be_usable(self.lab, self._lease)
            return BEFORE
        assert not (Path(self._lease["path"]) / ".git").exists(), "released, and still there"
        return AFTER


class PoolRelease(Release):
    name = "release (pool)"
    backend = "pool"
