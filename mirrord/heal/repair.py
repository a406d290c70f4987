"""One heal of one mirror: look, salvage, collect, prove, implant.

All but the last step happens in a view below the quarantine, so a cancelled or killed heal leaves the mirror as it was. A damaged
pack goes as soon as what is intact in it is here: git may read a damaged object from it before a good copy elsewhere. It is kept
whole, and read again by later heals. Other bad files of which something that is needed could be had from nobody stay where they
are. The caller holds the mirror's lock.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import structlog

from ..audit.connectivity import Missing, find_missing
from ..audit.object_files import TIMEOUT, BadFile, Fault, FileKind, find_bad_files
from ..audit.ref_files import Names, read_names
from ..audit.stand_in import (
    borrow_from,
    damaged_packs,
    is_readable_link,
    make_repository,
    make_view,
)
from ..errors import CorruptObjectError, DiskFullError, GitFailedError, MirrordError, StoppingError
from ..git.command import Git
from ..git.workers import Workers
from ..mirrors.history import BEGUN_ANEW, write_record
from ..mirrors.refs import theirs
from ..mirrors.repository import HISTORY, KEPT, Repository
from ..model import AuditLevel, FindingKind, MirrorName
from ..protocol import Progress, ProgressSink
from .donors import BundleFile, Donor, Donors, Remains, lying_at
from .publish import Implant, Step
from .ref_plan import RefPlan, find_past, plan_refs
from .transfer import SALVAGED, Salvage, Transplant, may_hold, salvage

NEW_HISTORY = "a new ref history"
_LINKED = "/linked"  # no pack has such a name
_BLAMES_LINKS = (CorruptObjectError, GitFailedError)

log = structlog.get_logger()


@dataclass(slots=True)
class Outcome:
    """What a heal did. `unhealed` are ids of needed objects that nobody had, `history` what became of a lost ref history,
    `refusals` why donors failed.
    """

    objects: dict[str, int] = field(default_factory=dict)
    bad_files: list[BadFile] = field(default_factory=list)
    refs: list[str] = field(default_factory=list)
    evidence: Path | None = None
    unhealed: frozenset[str] = frozenset()
    history: str = ""
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return bool(self.objects or self.bad_files or self.refs)


@dataclass(slots=True)
class Treatment:
    """The heal of the mirror `name` at `git_dir`. `recorded` are the commits that must be whole,
    `record` is one that the ref history must have; `suspects` are what an audit found, files among
    it that are damaged although their checksums are right.
    """

    git: Git
    workers: Workers
    name: MirrorName
    git_dir: Path
    work: Path
    quarantine: Path
    donors: Donors
    recorded: Collection[str]
    suspects: Mapping[str, Fault]
    default_branch: str | None
    record: str | None
    step: Step
    progress: ProgressSink | None = None
    outcome: Outcome = field(default_factory=Outcome)
    _salvaged: dict[str, Donor] = field(default_factory=dict)

    async def perform(self) -> Outcome:
        """Heal what can be healed."""
        self._tell("look for damage")
        names: Names = await self.workers.run(read_names, self.git_dir, timeout=TIMEOUT)
        bad_files = await self._bad_object_files()
        await anyio.to_thread.run_sync(make_view, self.git_dir, bad_files, names.refs, self._view)
        transplant = Transplant(self.git, self.workers, self._view, self.work)
        await self._salvage(bad_files, transplant)
        await self._follow_links(bad_files)
        known = {self.record} if self.record else set()
        missing = await self._collect({*self.recorded, *names.refs.values(), *known}, transplant)
        plan: RefPlan = await self.workers.run(
            plan_refs, self._view, names, self.default_branch, self.record, timeout=TIMEOUT
        )
        if known & missing.all:
            self.outcome.history = (
                f"record {self.record} was lost, and nobody has it; it goes on from what is here"
            )
        if plan.restore or known & missing.all:
            missing = await self._collect({*self.recorded, *plan.refs(names).values()}, transplant)
        if plan.lines:
            await self._write_history(
                plan.refs(names), plan, plan.lines, "joined by a heal", transplant
            )
            self.outcome.history = "it was moved back, and goes on from both of its lines"
        elif await self._history_is_lost(plan.refs(names), missing):
            await self._renew_history(plan.refs(names), plan, transplant)
            missing = await self._collect({*self.recorded, *plan.refs(names).values()}, transplant)
        plan.restore = {ref: oid for ref, oid in plan.restore.items() if oid not in missing.all}
        movable = [bad for bad in bad_files if self._may_go(bad, missing.all)] + names.faults
        if plan.head != names.head and not any(bad.path == "HEAD" for bad in movable):
            movable.append(BadFile("HEAD", FileKind.HEAD, f"it named {names.head}"))
        movable += [
            *self._replaced_refs(names, plan),
            *self._outdated(movable, missing, transplant),
        ]
        return await self._implant(transplant, missing, movable, plan)

    # -- the ref history ----------------------------------------------------------------------------------------------

    async def _history_is_lost(self, refs: Mapping[str, str], missing: Missing) -> bool:
        """Whether the records of what upstream had are not whole: no donor but a bundle has them."""
        return bool(refs) and (
            HISTORY not in refs or bool(missing and await self._missing({refs[HISTORY]}))
        )

    async def _renew_history(
        self, refs: Mapping[str, str], plan: RefPlan, transplant: Transplant
    ) -> None:
        """A record of the refs as they are, without which no sync could go on; on top of what the best bundle has, if any."""

        async def bring(file: BundleFile, record: str) -> bool:
            donors = [self.donors.opening(file)]
            return not await self._ask_each(
                donors, {record}, await self._missing({record}), transplant
            )

        past = await find_past(
            Repository(self.git, self.name, self._view),
            await self.donors.bundles(),
            self.name,
            bring,
        )
        log.warning(
            "history.lost",
            mirror=str(self.name),
            record=refs.get(HISTORY),
            bundle=past.donor if past else None,
        )
        if past:
            plan.restore |= {ref: oid for ref, oid in past.kept.items() if ref not in refs}
            self.outcome.history = f"its records were lost; it goes on from those of {past.at:%Y-%m-%d} in {past.donor}"
        else:
            self.outcome.history = "its records were lost, and no bundle has them; it begins anew"
        parents, why = ([past.record], "continued by a heal") if past else ([], BEGUN_ANEW)
        await self._write_history({**refs, **plan.restore}, plan, parents, why, transplant)

    async def _write_history(
        self,
        refs: Mapping[str, str],
        plan: RefPlan,
        parents: Sequence[str],
        why: str,
        transplant: Transplant,
    ) -> None:
        """A new record of the refs, as the tip of the history."""
        scratch = Repository(self.git, self.name, self.work / "history")
        await anyio.to_thread.run_sync(make_repository, scratch.path)
        borrow_from(scratch.path, self._view)
        kept = {ref.removeprefix(KEPT) for ref in refs if ref.startswith(KEPT)}
        plan.restore[HISTORY] = await write_record(
            scratch, theirs(dict(refs)), plan.head, [], kept=kept, parents=parents, why=why
        )
        await transplant.take_all(NEW_HISTORY, scratch.path, ())

    def _replaced_refs(self, names: Names, plan: RefPlan) -> list[BadFile]:
        """What restoring refs writes over, kept like every file that goes."""
        listed = {bad.path for bad in names.faults}
        changed = (ref for ref in [*plan.restore, *plan.drop] if ref in names.refs)
        loose = (ref for ref in changed if (self.git_dir / ref).is_file() and ref not in listed)
        bad = [BadFile(ref, FileKind.REF, f"it named {names.refs[ref]}") for ref in loose]
        if (
            (plan.restore or plan.drop)
            and "packed-refs" not in listed
            and (self.git_dir / "packed-refs").exists()
        ):
            bad.append(BadFile("packed-refs", FileKind.PACKED_REFS, "refs are lost from it"))
        return bad

    # -- objects ------------------------------------------------------------------------------------------------------

    @property
    def _view(self) -> Path:
        return self.work / "view"

    @property
    def _remains(self) -> Remains:
        return Remains(self.workers, self.quarantine, self.name, self.work, self._view)

    async def _bad_object_files(self) -> list[BadFile]:
        found = await self.workers.run(
            find_bad_files, self.git_dir, AuditLevel.CONTENT, timeout=TIMEOUT
        )
        known = {bad.path for bad in found}
        for name, fault in self.suspects.items():
            path = name if name.startswith("objects/") else f"objects/pack/{name}"
            if path in known or not (self.git_dir / path).is_file():
                continue
            if fault.kind is FindingKind.PACK and name.endswith(".pack"):
                found.append(
                    BadFile(path, FileKind.PACK, "an object in it is not what its index says")
                )
            elif fault.kind is FindingKind.DERIVED:
                found.append(BadFile(path, FileKind.DERIVED, fault.reason))
        return found

    async def _salvage(self, bad_files: Collection[BadFile], transplant: Transplant) -> None:
        """What is intact in damaged packs stays ours, whether anything needs it or not.

        They are donors afterwards: a delta can be read again when another donor has given what it builds on.
        """
        for number, pack in enumerate(damaged_packs(self.git_dir, bad_files)):
            self._tell(f"salvage {pack.name}")
            try:
                saved: Salvage = await self.workers.run(
                    salvage, pack, self.work / f"salvage-{number}", timeout=TIMEOUT
                )
                await transplant.take_all(f"{SALVAGED}{pack.name}", saved.path, saved.bad)
                borrow_from(saved.path, self._view)
                self._salvaged[pack.stem] = Donor(f"{SALVAGED}{pack.name}", lying_at(saved.path))
            except _BLAMES_LINKS as error:
                log.warning(
                    "salvage.failed", mirror=str(self.name), pack=pack.name, detail=error.message
                )

    async def _follow_links(self, bad_files: Collection[BadFile]) -> None:
        """Objects that only a symbolic link in the mirror leads to are taken before it goes."""
        links = {bad.path for bad in bad_files if is_readable_link(self.git_dir / bad.path)}
        if links:
            others = [bad for bad in bad_files if bad.path not in links]
            linked = self.work / "linked"
            await anyio.to_thread.run_sync(
                partial(make_view, link=os.symlink), self.git_dir, others, {}, linked
            )
            self._salvaged[_LINKED] = Donor("what symbolic links lead to", lying_at(linked))

    async def _collect(self, tips: Collection[str], transplant: Transplant) -> Missing:
        """Ask donors for what is missing, round after round for as long as it gets less; answers what nobody had."""
        missing = await self._missing(tips)
        donors = (
            [*await self.donors.all(tips), *self._salvaged.values(), *self._remains.donors()]
            if missing
            else []
        )
        while missing:
            left = await self._ask_each(donors, tips, missing, transplant)
            if left.all == missing.all:
                return left
            missing = left
        return missing

    async def _ask_each(
        self,
        donors: Collection[Donor],
        tips: Collection[str],
        missing: Missing,
        transplant: Transplant,
    ) -> Missing:
        """Each in turn, for as long as it gives."""
        for donor in donors:
            while missing and await self._ask(donor, missing, transplant):
                missing = await self._missing(tips)
            if not missing:
                break
        return missing

    async def _ask(self, donor: Donor, missing: Missing, transplant: Transplant) -> int:
        """A donor that fails, whatever it is, is one that has nothing."""
        self._tell(f"{len(missing.all)} objects are missing, ask {donor.name}")
        try:
            async with donor.lend(missing) as repository:
                return (
                    await transplant.take_missing(donor.name, repository, missing)
                    if repository
                    else 0
                )
        except (DiskFullError, StoppingError):
            raise
        except MirrordError as error:
            log.warning("donor.failed", donor=donor.name, code=error.code, detail=error.message)
            self.donors.refusals[donor.name] = error.message
            return 0

    async def _missing(self, tips: Collection[str]) -> Missing:
        found: Missing = await self.workers.run(
            find_missing, self._view, sorted(tips), timeout=TIMEOUT
        )
        return found

    def _may_go(self, bad: BadFile, unhealed: Collection[str]) -> bool:
        """A file stays when it may hold something needed that nobody else has, but for packs of which the intact part is here."""
        if not unhealed or bad.kind in {FileKind.DERIVED, FileKind.PLANTED}:
            return True
        if bad.kind is FileKind.LAYOUT:
            return not is_readable_link(self.git_dir / bad.path)
        if bad.kind is FileKind.LOOSE:
            return bad.path.removeprefix("objects/").replace("/", "") not in unhealed
        file = self.git_dir / bad.path
        return file.stem in self._salvaged or not may_hold(file, unhealed)

    def _outdated(
        self, movable: Collection[BadFile], missing: Missing, transplant: Transplant
    ) -> Iterator[BadFile]:
        """What git derived from packs that go, and from commits that nobody has. Maintenance writes it again."""
        listed = {bad.path for bad in movable}
        objects = self.git_dir / "objects"
        outdated: list[Path] = []
        if any(bad.kind in {FileKind.PACK, FileKind.INDEX} for bad in movable):
            outdated += (objects / "pack").glob("multi-pack-index*")
        is_lying = any(Path(bad.path).name.startswith("commit-graph") for bad in movable)
        if missing.commits or NEW_HISTORY in transplant.counts or is_lying:
            outdated += [
                *(objects / "info/commit-graphs").glob("*"),
                *(objects / "info").glob("commit-graph"),
            ]
        for path in (str(file.relative_to(self.git_dir)) for file in outdated if file.is_file()):
            if path not in listed:
                yield BadFile(path, FileKind.DERIVED, "it names what goes, or what nobody has")

    async def _implant(
        self, transplant: Transplant, missing: Missing, movable: list[BadFile], plan: RefPlan
    ) -> Outcome:
        final = self.work / "final"
        await anyio.to_thread.run_sync(make_repository, final)
        borrow_from(final, self._view)
        await self._prove(transplant, final, whole=not missing)
        outcome = self.outcome
        outcome.objects, outcome.bad_files, outcome.refs = (
            transplant.counts,
            movable,
            sorted(plan.restore),
        )
        outcome.unhealed, outcome.refusals = missing.all, self.donors.refusals
        if not outcome.changed:
            return outcome
        self._tell("put everything in place")
        implant = Implant(
            name=self.name,
            git_dir=self.git_dir,
            quarantine=self.quarantine,
            work=final,
            bad_files=movable,
            plan=plan,
            step=self.step,
        )
        with anyio.CancelScope(shield=True):
            outcome.evidence = await anyio.to_thread.run_sync(implant.perform)
        return outcome

    async def _prove(self, transplant: Transplant, final: Path, *, whole: bool) -> None:
        """Strictly where nothing is missing; salvaged objects that nothing reaches may name others that were never here."""
        try:
            await transplant.prove(final, whole=whole)
        except MirrordError:
            if not whole or not any(name.startswith(SALVAGED) for name in transplant.counts):
                raise
            await transplant.prove(final, whole=False)

    def _tell(self, note: str) -> None:
        if self.progress:
            self.progress(Progress(unit="steps", note=f"{self.name}: {note}"))
