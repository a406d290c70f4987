"""What mirrord does that writes, each as something that can be begun, looked at after a fault, and done again.

`run` is done in full by a healthy daemon. `outcome` looks at what a fault left and says which state that is: the one before, or
the one after; anything in between is an AssertionError. `settle` does it again, to the end, and proves the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from gitrepos import git

from .judge import must_be_usable
from .lab import NAME, Lab, Refused, refs_of

BEFORE, AFTER = "the state before", "the state after"
UNPINNED = "the dataset says which commits have no pin, and why"
TOO_MANY = "the state before, with pins too many until the next import or start"


class Operation(ABC):
    """One piece of work on one lab. A new one for every fault: the constructor makes something to do."""

    name: str

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @abstractmethod
    def run(self) -> None: ...

    @abstractmethod
    def outcome(self) -> str: ...

    def is_sound(self, outcome: str) -> bool:
        """Whether an audit has nothing to say before the operation is done again."""
        return outcome != UNPINNED

    def settle(self) -> None:
        if self.outcome() != AFTER:
            self.run()
        assert self.outcome() == AFTER, f"{self.name} does not work afterwards"

    def clean(self) -> None:  # noqa: B027
        """Take away what the next operation does not need."""


class FirstClone(Operation):
    name = "first clone"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._short = f"first{lab.number()}"
        (lab.root / "up" / f"o__{self._short}").symlink_to(lab.upstream.path)

    def run(self) -> None:
        self.lab.finish(self.lab.call("POST", "mirrors", {"repo": f"o/{self._short}"}))

    def outcome(self) -> str:
        path = self.lab.state / "mirrors" / f"o__{self._short}"
        if not path.exists():
            return BEFORE
        assert refs_of(path, "refs/heads", "refs/tags") == self.lab.offered(), "half a mirror"
        assert git(path, "rev-parse", "refs/mirrord/history")
        git(path, "rev-parse", "HEAD^{tree}")
        return AFTER

    def settle(self) -> None:
        self.run()
        assert self.outcome() == AFTER
        row = self.lab.call("GET", f"mirrors/o__{self._short}")
        assert row["state"] == "ready", row

    def clean(self) -> None:
        self.lab.call("DELETE", f"mirrors/o__{self._short}")


class MirrorRemoval(FirstClone):
    name = "mirror removal"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        FirstClone.run(self)

    def run(self) -> None:
        self.lab.call("DELETE", f"mirrors/o__{self._short}")

    def outcome(self) -> str:
        return BEFORE if super().outcome() == AFTER else AFTER

    def settle(self) -> None:
        with suppress(Refused):
            self.run()
        assert self.outcome() == AFTER
        assert f"o__{self._short}" not in {mirror["name"] for mirror in self.lab.call("GET", "mirrors")}

    def clean(self) -> None:
        pass


class Sync(Operation):
    """Upstream moved on, force-pushed one branch, deleted one and made a directory of another."""

    name = "sync"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        up, number = lab.upstream, lab.number()
        up.git("branch", f"topic-{number}", lab.commits[5])
        up.git("branch", "--force", "moved", up.commit({"m": str(number)}))
        up.git("branch", "--force", "shape", lab.commits[number % 7])
        lab.sync()
        self._old = lab.offered()
        up.git("branch", "--delete", "--force", f"topic-{number}", "shape")
        up.git("branch", f"shape/{number}", lab.commits[4])
        up.git("branch", "--force", "moved", lab.commits[number % 5])
        up.git("tag", f"tag-{number}", up.commit({"s": str(number)}))
        self._new = lab.offered()
        self._number = number

    def run(self) -> None:
        self.lab.sync()

    def outcome(self) -> str:
        refs = refs_of(self.lab.mirror, "refs/heads", "refs/tags")
        assert refs in (self._old, self._new), f"half of the refs moved: {refs.items() ^ self._new.items()}"
        record = git(self.lab.mirror, "cat-file", "blob", "refs/mirrord/history:refs")
        recorded = {line for line in record.splitlines() if not line.startswith("@")}
        assert recorded == {f"{oid} {ref}" for ref, oid in refs.items()}, "the ref history does not say what the refs are"
        if refs == self._old:
            return BEFORE
        kept = refs_of(self.lab.mirror, "refs/mirrord/kept").values()
        assert self._old["refs/heads/moved"] in kept, "a tip that upstream moved away from is not kept"
        return AFTER

    def clean(self) -> None:
        self.lab.upstream.git("branch", "--delete", "--force", f"shape/{self._number}")
        self.lab.sync()


class Pin(Operation):
    name = "pin"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._commit = lab.commits[8 + lab.number() % 12]
        with suppress(Refused):
            self._unpin()

    @property
    def _pin(self) -> tuple[str, str]:
        return self._commit, "person/0"

    def run(self) -> None:
        self.lab.call("POST", "pins", {"mirror": NAME, "commit": self._commit, "reason": "mine"})
        self.lab.truth.pins.add(self._pin)

    def _unpin(self) -> None:
        self.lab.truth.pins.discard(self._pin)
        self.lab.call("DELETE", f"pins/{NAME}/{self._commit}")

    def outcome(self) -> str:
        there = {(pin["commit"], pin["owner"]) for pin in self.lab.call("GET", f"pins?mirror={NAME}")}
        return AFTER if self._pin in there else BEFORE

    def clean(self) -> None:
        with suppress(Refused):
            self._unpin()


class Unpin(Pin):
    name = "unpin"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        super().run()

    def run(self) -> None:
        self._unpin()

    def outcome(self) -> str:
        return BEFORE if super().outcome() == AFTER else AFTER


class Import(Operation):
    """A file that changes a dataset: one commit stays, one goes, one is new."""

    name = "import"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._dataset, n = f"data{lab.number()}", lab.number() % 10
        self._old, self._new = lab.commits[n : n + 2], lab.commits[n + 1 : n + 5]
        lab.import_rows(self._dataset, self._old)

    def run(self) -> None:
        owner = f"dataset/{self._dataset}"
        kept = {(commit, owner) for commit in self._old if commit in self._new}
        self.lab.truth.pins = {pin for pin in self.lab.truth.pins if pin[1] != owner} | kept
        self.lab.import_rows(self._dataset, self._new)

    def outcome(self) -> str:
        instances = {row["id"] for row in self.lab.call("GET", f"instances?dataset={self._dataset}")}
        wanted = next((c for c in (self._old, self._new) if {f"{self._dataset}-{oid[:12]}" for oid in c} == instances), None)
        assert wanted is not None, f"neither the old dataset nor the new one: {instances}"
        owner = f"dataset/{self._dataset}"
        pinned = {pin["commit"] for pin in self.lab.call("GET", f"pins?mirror={NAME}") if pin["owner"] == owner}
        unpinned = {it["commit"] for it in self.lab.call("GET", f"datasets/{self._dataset}")["unpinned"]}
        assert pinned | unpinned == set(wanted), (
            f"pins that the dataset does not record, or the other way: {pinned ^ set(wanted)}"
        )
        if unpinned:
            return UNPINNED
        return AFTER if wanted is self._new else BEFORE

    def clean(self) -> None:
        self._forget()
        with suppress(Refused):
            self.lab.call("DELETE", f"datasets/{self._dataset}")

    def _forget(self) -> None:
        self.lab.truth.pins = {pin for pin in self.lab.truth.pins if pin[1] != f"dataset/{self._dataset}"}


class DatasetRemoval(Import):
    name = "dataset removal"

    def run(self) -> None:
        self._forget()
        self.lab.call("DELETE", f"datasets/{self._dataset}")

    def outcome(self) -> str:
        if self._dataset in {dataset["name"] for dataset in self.lab.call("GET", "datasets")}:
            assert super().outcome() == BEFORE
            return BEFORE
        owners = {pin["owner"] for pin in self.lab.call("GET", f"pins?mirror={NAME}")}
        assert f"dataset/{self._dataset}" not in owners, "pins of a dataset that is gone"
        return AFTER


class Maintenance(Operation):
    name = "maintenance"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        for _ in range(2):
            lab.upstream.commit({"maintained": str(lab.number())})
            lab.upstream.git("tag", f"tag-{lab.number()}")
            lab.sync()
        (lab.mirror / "mirrord-repacked").unlink(missing_ok=True)

    def run(self) -> None:
        self.lab.maintain()

    def outcome(self) -> str:
        packs = list((self.lab.mirror / "objects/pack").glob("pack-*.pack"))
        return AFTER if len(packs) <= 2 else BEFORE


class Heal(Operation):
    """The newest pack of the mirror was lost."""

    name = "heal"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        commit = lab.upstream.commit({"healed": str(lab.number())})
        lab.sync()
        self._dataset = f"data{lab.number()}"
        lab.import_rows(self._dataset, [commit])
        self._commit = commit
        indexes = (lab.mirror / "objects/pack").glob("*.idx")
        holder = next(file for file in indexes if commit in git(lab.mirror, "show-index", stdin=file.read_bytes()))
        for file in holder.parent.glob(f"{holder.stem}.*"):
            file.unlink()

    def run(self) -> None:
        self.lab.finish(self.lab.call("POST", "heals", {"mirrors": [NAME]}))

    def outcome(self) -> str:
        done = git(self.lab.mirror, "-c", "core.commitGraph=false", "rev-list", "--objects", "--quiet", self._commit, check=False)
        found = git(self.lab.mirror, "cat-file", "--batch-check", stdin=self._commit.encode())
        return BEFORE if found.endswith("missing") or "fatal" in done else AFTER

    def is_sound(self, outcome: str) -> bool:
        return outcome == AFTER

    def clean(self) -> None:
        self.lab.truth.pins = {pin for pin in self.lab.truth.pins if pin[1] != f"dataset/{self._dataset}"}
        self.lab.call("DELETE", f"datasets/{self._dataset}")


class Checkout(Operation):
    """Of a commit that nobody asked for yet, so its template is built. Whoever was not answered may have a lease that expires."""

    name = "template build"
    backend = "overlay"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.commit = lab.upstream.commit({f"src/mod{lab.number() % 5}.py": f"made = {lab.number()}\n"})
        lab.sync()
        self._before = {lease["id"] for lease in lab.call("GET", "checkouts")}

    def run(self) -> None:
        self.lab.checkout(self.commit, self.backend)

    def outcome(self) -> str:
        return AFTER if self._made() else BEFORE

    def _made(self) -> list[dict[str, Any]]:
        made = [lease for lease in self.lab.call("GET", "checkouts") if lease["id"] not in self._before]
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


class Reset(Operation):
    """A dirty checkout goes on to another commit."""

    name = "reset (overlay)"
    backend = "overlay"

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
        if lease["commit"] == self._from:
            assert (tree / "README").read_text() == "dirty\n", "neither as its owner left it nor reset"
            return BEFORE
        assert lease["commit"] == self._to
        return AFTER

    def is_sound(self, outcome: str) -> bool:
        """Until it is reset its tree is as its owner left it."""
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


OPERATIONS: tuple[type[Operation], ...] = (
    FirstClone, Sync, Pin, Unpin, Import, DatasetRemoval, Maintenance, Heal, Checkout, WarmCheckout, PoolCheckout,
    Reset, PoolReset, Release, PoolRelease, MirrorRemoval,
)  # fmt: skip
