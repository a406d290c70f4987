"""Work on datasets as operations: an import that changes one, and the removal of one."""

from __future__ import annotations

from contextlib import suppress

from .lab import NAME, Lab, Refused
from .operation import AFTER, BEFORE, UNPINNED, Operation


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
        instances = {
            row["id"] for row in self.lab.call("GET", f"instances?dataset={self._dataset}")
        }
        wanted = next(
            (
                c
                for c in (self._old, self._new)
                if {f"{self._dataset}-{oid[:12]}" for oid in c} == instances
            ),
            None,
        )
        assert wanted is not None, f"neither the old dataset nor the new one: {instances}"
        owner = f"dataset/{self._dataset}"
        pinned = {
            pin["commit"]
            for pin in self.lab.call("GET", f"pins?mirror={NAME}")
            if pin["owner"] == owner
        }
        unpinned = {
            it["commit"] for it in self.lab.call("GET", f"datasets/{self._dataset}")["unpinned"]
        }
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
        self.lab.truth.pins = {
            pin for pin in self.lab.truth.pins if pin[1] != f"dataset/{self._dataset}"
        }


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
