"""Work on mirrors as operations: first clone, sync, pins, maintenance, heal, removal."""

from __future__ import annotations

from contextlib import suppress

from gitrepos import git

from mirrord.audit.refs import read_record
from mirrord.mirrors.repository import HISTORY

from .lab import NAME, Lab, Refused, refs_of
from .operation import AFTER, BEFORE, Operation


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
        assert f"o__{self._short}" not in {
            mirror["name"] for mirror in self.lab.call("GET", "mirrors")
        }

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
        assert refs in (self._old, self._new), (
            f"half of the refs moved: {refs.items() ^ self._new.items()}"
        )
        recorded = read_record(self.lab.mirror, HISTORY).followed
        assert recorded == refs, "the ref history does not say what the refs are"
        if refs == self._old:
            return BEFORE
        kept = refs_of(self.lab.mirror, "refs/mirrord/kept").values()
        assert self._old["refs/heads/moved"] in kept, (
            "a tip that upstream moved away from is not kept"
        )
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
        there = {
            (pin["commit"], pin["owner"]) for pin in self.lab.call("GET", f"pins?mirror={NAME}")
        }
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
        holder = next(
            file
            for file in indexes
            if commit in git(lab.mirror, "show-index", stdin=file.read_bytes())
        )
        for file in holder.parent.glob(f"{holder.stem}.*"):
            file.unlink()

    def run(self) -> None:
        self.lab.finish(self.lab.call("POST", "heals", {"mirrors": [NAME]}))

    def outcome(self) -> str:
        done = git(
            self.lab.mirror,
            "-c",
            "core.commitGraph=false",
            "rev-list",
            "--objects",
            "--quiet",
            self._commit,
            check=False,
        )
        found = git(self.lab.mirror, "cat-file", "--batch-check", stdin=self._commit.encode())
        return BEFORE if found.endswith("missing") or "fatal" in done else AFTER

    def is_sound(self, outcome: str) -> bool:
        return outcome == AFTER

    def clean(self) -> None:
        self.lab.truth.pins = {
            pin for pin in self.lab.truth.pins if pin[1] != f"dataset/{self._dataset}"
        }
        self.lab.call("DELETE", f"datasets/{self._dataset}")
