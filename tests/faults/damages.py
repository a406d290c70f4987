"""Random damage to one thing in a mirror, and a heal with whatever donors there happen to be: is all back that anybody had?

Each round is judged twice: after a heal with the donors that chance gave, and where those could not mend it, after one with all
of them. The truth was written down before, the objects are hashed here; nothing that mirrord says is taken for it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator
from functools import partial

from gitrepos import git
from heal_parts import refs_of, snapshot

from mirrord.mirrors.repository import HISTORY
from mirrord.model import AuditLevel, CommitState
from mirrord.protocol import Audit, StartAudit

from .damaged_mirror import ALL_DONORS, DamagedMirror, some_donors
from .injuries import Injury, some_injury
from .objects import readable
from .plan import Part, told
from .report import Row
from .rounds import living, parts_of

_FAULT = "damage"


def parts() -> list[Part]:
    return parts_of("damage", rounds)


def rounds(seed: int, numbers: Collection[int]) -> Iterator[Row]:
    """One row for each number; the same seed and number are the same kind of damage and the same donors. Where it strikes may
    differ: records of the ref history hold the time, so their ids and those of packs do too.
    """
    with living(DamagedMirror) as (damaged, portal):
        for number in numbers:
            chance = random.Random(f"{seed} damage {number}")
            injury, donors = some_injury(chance), some_donors(chance)
            trial = Trial(damaged, injury, donors)
            yield told(
                _FAULT,
                injury.name,
                ", ".join(donors) or "nobody",
                partial(portal.call, trial.run, chance),
            )


class Trial:
    """One damage, and what became of it."""

    def __init__(self, damaged: DamagedMirror, injury: Injury, donors: list[str]) -> None:
        self.damaged = damaged
        self.injury = injury
        self.donors = donors
        self.truth = damaged.truth
        self._has_new_history = False

    async def run(self, chance: random.Random) -> Row:
        self.damaged.restore(self.injury.shape)
        history = self.truth.refs[HISTORY]
        await self.damaged.catalog.update_mirror(self.damaged.name.key, history=history, error=None)
        self.injury.injure(self.damaged, chance)
        before = snapshot(self.damaged.mirror)
        with self.damaged.with_donors(self.donors):
            missing = self._judge(await self._heal(), self.donors)
        self._nothing_thrown_away(before)
        did = "repaired"
        if missing:
            with self.damaged.with_donors(ALL_DONORS):
                assert not self._judge(await self._heal(), ALL_DONORS), (
                    "all donors together do not heal it"
                )
            self._nothing_thrown_away(before)
            did = "nobody had it: named with the instances it affects, its bytes kept, repaired when a donor came"
        return Row(_FAULT, self.injury.name, ", ".join(self.donors) or "nobody", did)

    async def _heal(self) -> Audit:
        request = StartAudit(mirrors=[self.damaged.name.repo], heal=True, level=AuditLevel.CONTENT)
        return await self.damaged.audits.run(request)

    # -- the judge ----------------------------------------------------------------------------------------------------

    def _judge(self, audit: Audit, donors: Collection[str]) -> set[str]:
        """Everything that can be had is there and right, and the rest is told as it is; answers what is missing."""
        mirror = self.damaged.mirror
        errors = [repair.error for repair in audit.repairs if repair.error]
        assert not errors, errors
        self._names_are_right(donors)
        absent = self.truth.links.keys() - readable(mirror, self.truth.links)
        missing = set(absent)
        if self._has_new_history:
            missing -= self.truth.closure(
                self.truth.refs[HISTORY]
            )  # begun anew: nobody needs the old records
        wanted = {oid for oid in missing if self._could_be_had(oid, absent, donors)}
        assert not wanted, f"not repaired, and a donor has it: {sorted(wanted)[:3]}"
        self._audit_is_true(audit, missing)
        if not missing:
            git(mirror, "fsck", "--full", "--no-dangling")
        return missing

    def _could_be_had(self, oid: str, missing: Collection[str], donors: Collection[str]) -> bool:
        """Whether a donor has it, and what is there says that it is needed."""
        has = [name for name in donors if oid in self.truth.donors[name]]
        if self.truth.bases & set(missing):  # the bundle cannot be opened without what it builds on
            has = [name for name in has if name != "incremental bundle"]
        tips = {*self.truth.refs.values(), *self.truth.recorded.values()}
        is_known = oid in tips or any(
            oid in links for holder, links in self.truth.links.items() if holder not in missing
        )
        return bool(has) and is_known

    def _names_are_right(self, donors: Collection[str]) -> None:
        mirror = self.damaged.mirror
        refs, wanted = refs_of(mirror), self.truth.refs
        if refs.get(HISTORY) != wanted[HISTORY]:
            assert self._has_new_history or "bundle" not in donors, (
                "the ref history was given up, and a bundle has it"
            )
            assert HISTORY in refs, "no ref history"
            self._has_new_history = True
            refs, wanted = (
                {ref: oid for ref, oid in some.items() if ref != HISTORY} for some in (refs, wanted)
            )
        assert refs == wanted, f"refs: {dict(refs.items() ^ wanted.items())}"
        assert (mirror / "HEAD").read_text() == self.truth.head
        assert git(mirror, "config", "--list", "--local") == git(
            self.damaged.pristine, "config", "--list", "--local"
        )

    def _audit_is_true(self, audit: Audit, missing: Collection[str]) -> None:
        affected = {
            name
            for name, commit in self.truth.recorded.items()
            if self.truth.closure(commit) & set(missing)
        }
        assert set(audit.affected) == affected, (
            f"said to be affected: {audit.affected}; are: {sorted(affected)}"
        )
        named = {name for finding in audit.findings for name in finding.instances}
        assert affected <= named, f"not in a finding: {affected - named}"
        if not missing:
            assert (set(audit.counts), audit.findings) == ({CommitState.OK}, []), audit.findings[:2]

    def _nothing_thrown_away(self, before: dict[str, str]) -> None:
        """Every file that was there after the damage is there still, or in the evidence."""
        after = set(snapshot(self.damaged.mirror).values())
        if self.damaged.damaged.exists():
            after |= set(snapshot(self.damaged.damaged).values())
        empty = hashlib.sha256(b"").hexdigest()
        gone = [name for name, digest in before.items() if digest not in after and digest != empty]
        assert not gone, f"thrown away: {gone[:3]}"
