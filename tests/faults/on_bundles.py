"""Bundles as operations: one is made by the product's own client, one becomes a mirror again, one adds to a mirror."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from gitrepos import git

from mirrord import Client
from mirrord.errors import MirrordError

from .judge import must_be_whole
from .lab import NAME, Lab, Refused, refs_of
from .operation import AFTER, BEFORE, UNPINNED, Operation

_SHORT = "bundled"
_COPY = f"o__{_SHORT}"


def create(lab: Lab, mirror: str, file: Path) -> None:
    """Raises Refused, also where the stream is cut off."""
    with Client(lab.daemon.socket) as client:
        try:
            client.create_bundle(mirror, file)
        except MirrordError as error:
            raise Refused({"code": error.code, "detail": error.message}) from error


class BundleCreation(Operation):
    """The client's file appears when it is whole, or not at all."""

    name = "bundle create"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._file = lab.root / f"out-{lab.number()}" / "bundle"
        self._file.parent.mkdir()

    def run(self) -> None:
        create(self.lab, NAME, self._file)

    def outcome(self) -> str:
        left = {path.name for path in self._file.parent.iterdir()}
        assert left <= {self._file.name}, f"half a bundle was left: {left}"
        return self._whole() if left else BEFORE

    def _whole(self) -> str:
        """git alone gets all of it out."""
        copy = self._file.with_name("copy.git")
        git(self._file.parent, "init", "--quiet", "--bare", copy.name)
        git(copy, "fetch", "--quiet", str(self._file), "+refs/*:refs/*")
        refs, wanted = refs_of(copy, "refs"), refs_of(self.lab.mirror, "refs")
        assert wanted.items() <= refs.items(), (
            f"refs that the bundle lacks: {wanted.items() - refs.items()}"
        )
        must_be_whole(copy, sorted(set(wanted.values())))
        shutil.rmtree(copy)
        return AFTER

    def clean(self) -> None:
        shutil.rmtree(self._file.parent)


class BundleImport(Operation):
    """A mirror that is here no longer, with a dataset and pins; its upstream is gone too."""

    name = "bundle import (new mirror)"
    after_kill = frozenset(
        {BEFORE, AFTER, UNPINNED}
    )  # rows of datasets come before pins, and are told of

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self._file = lab.root / "bundle"
        self._refs_file = lab.root / "bundle.refs"
        if not self._file.exists():
            self._make()
        self._refs = dict(line.split() for line in self._refs_file.read_text().splitlines())

    def _make(self) -> None:
        lab, upstream = self.lab, self.lab.root / "up" / _COPY
        upstream.symlink_to(lab.upstream.path)
        lab.finish(lab.call("POST", "mirrors", {"repo": f"o/{_SHORT}"}))
        lab.import_rows(_SHORT, lab.commits[2:5], repo=f"o/{_SHORT}")
        lab.call("POST", "pins", {"mirror": _COPY, "commit": lab.commits[9], "reason": "bundled"})
        create(lab, _COPY, self._file)
        upstream.unlink()
        refs = refs_of(self._path, "refs")
        self._refs_file.write_text("".join(f"{ref} {oid}\n" for ref, oid in refs.items()))
        self.clean()

    @property
    def _path(self) -> Path:
        return self.lab.state / "mirrors" / _COPY

    def run(self) -> None:
        self.lab.finish(self.lab.call("POST", "bundles", self._file.read_bytes()))

    def outcome(self) -> str:
        if not self._path.exists():
            return UNPINNED if self._has_rows() else BEFORE
        refs = refs_of(self._path, "refs")
        assert refs == self._refs, f"half a mirror: {refs.items() ^ self._refs.items()}"
        must_be_whole(self._path, sorted(set(refs.values())))
        pins = {
            (pin["commit"], pin["owner"]) for pin in self.lab.call("GET", f"pins?mirror={_COPY}")
        }
        wanted = {
            (ref.rpartition("/")[2], "/".join(ref.split("/")[3:5]))
            for ref in refs
            if ref.startswith("refs/mirrord/pins/")
        }
        assert pins == wanted, f"catalog and refs disagree on pins: {pins ^ wanted}"
        assert self._has_rows(), "pins of a dataset, without its rows"
        return AFTER

    def _has_rows(self) -> bool:
        if _SHORT not in {dataset["name"] for dataset in self.lab.call("GET", "datasets")}:
            return False
        dataset = self.lab.call("GET", f"datasets/{_SHORT}")
        unpinned = {it["commit"] for it in dataset["unpinned"]}
        assert unpinned in (set(), set(self.lab.commits[2:5])), f"half of the pins: {unpinned}"
        assert bool(unpinned) != self._path.exists(), (
            "pins of a mirror that is not there, or the other way"
        )
        return True

    def is_sound(self, outcome: str) -> bool:
        return outcome == AFTER

    def settle(self) -> None:
        self.run()
        assert self.outcome() == AFTER
        row = self.lab.call("GET", f"mirrors/{_COPY}")
        known = (
            row["default_branch"],
            row["ref_count"],
            row["synced_at"] is not None,
        )  # its upstream is gone, so it may have failed
        assert known == ("main", sum("/mirrord/" not in ref for ref in self._refs), True), row

    def clean(self) -> None:
        self.lab.call("DELETE", f"datasets/{_SHORT}")
        with suppress(Refused):
            self.lab.call("DELETE", f"pins/{_COPY}/{self.lab.commits[9]}")
        self.lab.call("DELETE", f"mirrors/{_COPY}")


class BundleOfMore(Operation):
    """Objects, a branch and a person's pin that the mirror does not have, built on what it has."""

    name = "bundle import (into a mirror)"

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        number = lab.number()
        self._branch, self._file = f"refs/heads/bundled-{number}", lab.root / f"more-{number}"
        base = lab.commits[6]
        tree = git(lab.upstream.path, "rev-parse", f"{lab.commits[number % 6]}^{{tree}}")
        elsewhere = lab.root / f"elsewhere-{number}.git"
        git(lab.root, "clone", "--quiet", "--bare", str(lab.upstream.path), elsewhere.name)
        self._tip = git(
            elsewhere,
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@b",
            "commit-tree",
            "-p",
            base,
            "-m",
            f"{number}",
            tree,
        )
        self._pin = (self._tip, "person/7")
        self._pin_ref = f"refs/mirrord/pins/person/7/{self._tip}"
        git(elsewhere, "update-ref", self._branch, self._tip)
        git(elsewhere, "update-ref", self._pin_ref, self._tip)
        git(
            elsewhere,
            "bundle",
            "create",
            "--quiet",
            str(self._file),
            self._branch,
            self._pin_ref,
            f"^{base}",
        )
        shutil.rmtree(elsewhere)

    def run(self) -> None:
        self.lab.finish(self.lab.call("POST", f"bundles?mirror={NAME}", self._file.read_bytes()))
        self.lab.truth.tips.add(self._tip)
        self.lab.truth.pins.add(self._pin)

    def outcome(self) -> str:
        refs = refs_of(self.lab.mirror, "refs")
        there = {ref for ref in (self._branch, self._pin_ref) if refs.get(ref) == self._tip}
        if any(
            ref.startswith("refs/mirrord/kept/") and oid == self._tip for ref, oid in refs.items()
        ):
            there.add(self._branch)  # a sync came by: upstream does not have it
        pinned = self._pin in {
            (pin["commit"], pin["owner"]) for pin in self.lab.call("GET", f"pins?mirror={NAME}")
        }
        assert len(there) in {0, 2}, f"half of the refs: {there}"
        assert pinned == bool(there), "catalog and refs disagree on a pin"
        if not there:
            return BEFORE
        must_be_whole(self.lab.mirror, [self._tip])
        return AFTER

    def clean(self) -> None:
        self.lab.truth.pins.discard(self._pin)
        self.lab.call("DELETE", f"pins/{NAME}/{self._tip}?owner=person/7")
