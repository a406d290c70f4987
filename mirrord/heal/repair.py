"""One heal: find damage, salvage, collect from donors, prove, publish.

All but the last step happens in a stand-in in quarantine, so a cancelled or killed heal leaves the
mirror as it was. A damaged pack moves to quarantine once its intact objects are in the stand-in;
there it is a donor of later heals. Other bad files stay in place while they may hold a needed
object that no donor has. The caller holds the mirror's lock.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from .. import errors
from ..audit.connectivity import MissingObjects, find_missing
from ..audit.defects import TIMEOUT, BadFile, Defect, FileKind
from ..audit.object_files import find_bad_files
from ..audit.refs import RefFiles, read_ref_files
from ..audit.stand_in import borrow_from, is_readable_link, make_repository, make_stand_in
from ..bundles.merging import must_be_history
from ..mirrors.history import RESTARTED, list_records, write_record
from ..mirrors.refs import followed_refs
from ..mirrors.repository import HISTORY, KEPT, Repository
from ..model import AuditLevel, FindingKind
from ..presence import exists, is_file, matching
from ..protocol import Progress, Repair
from ..telemetry import log
from .damaged_packs import salvage
from .donors import SALVAGED, Donor, DonorBundle, Donors, lend
from .publish import RefPlan, plan_refs, publish
from .transfer import Transfer

_NEW_HISTORY = "a new ref history"
_PACK_KINDS = {FileKind.PACK, FileKind.INDEX}


@dataclass(eq=False)
class MirrorRepair:
    """The heal of the mirror at `git_dir` with `donors`.

    `recorded` are the commits that must be whole. `suspects` are the defects that an audit found;
    their files may have a right checksum.
    """

    donors: Donors
    git_dir: Path
    recorded: Collection[str]
    suspects: Mapping[str, Defect]
    history: str = ""  # how the ref history was continued, where it was lost
    salvaged: dict[str, Donor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.work = self.donors.row.name, self.donors.work
        self.workers, self.stand_in = self.donors.mirrors.workers, self.donors.stand_in
        self.transfer = Transfer(self.donors.mirrors.git, self.workers, self.stand_in, self.work)

    async def perform(self) -> Repair:
        self._report("look for damage")
        files = await self.workers.run(read_ref_files, self.git_dir, timeout=TIMEOUT)
        bad_files = await self._find_bad_files()
        await anyio.to_thread.run_sync(
            make_stand_in, self.git_dir, bad_files, files.refs, self.stand_in
        )
        await self._salvage(bad_files)
        record = self.donors.row.history
        records = {record} if record else set()
        missing = await self._collect({*self.recorded, *files.refs.values(), *records})
        branch = self.donors.row.default_branch
        plan = await self.workers.run(
            plan_refs, self.stand_in, files, branch, record, timeout=TIMEOUT
        )
        if records & missing.all:
            lost = f"record {record} was lost, and no donor has it"
            self.history = f"{lost}; continued from what is here"
        if plan.restore or records & missing.all:
            missing = await self._collect({*self.recorded, *plan.refs(files).values()})
        refs = plan.refs(files)
        if plan.branches:
            await self._write_history(refs, plan, plan.branches, "joined by a heal")
            self.history = "it was moved back; continued from both of its branches"
        elif refs and (
            HISTORY not in refs or (missing and await self._missing({refs[HISTORY]}))
        ):  # records are missing, and only a bundle can have them
            await self._restart_history(refs, plan)
            missing = await self._collect({*self.recorded, *plan.refs(files).values()})
        elif plan.remnant:
            await self._write_history(refs, plan, [plan.remnant], "continued by a heal")
            self.history = "its newest records were lost; continued from what is here"
        plan.restore = {ref: oid for ref, oid in plan.restore.items() if oid not in missing.all}
        replaced = [bad for bad in bad_files if self._is_replaceable(bad, missing.all)] + files.bad
        if plan.head != files.head and not any(bad.path == "HEAD" for bad in replaced):
            replaced.append(BadFile("HEAD", FileKind.HEAD, f"it named {files.head}"))
        replaced += [*self._replaced_refs(files, plan), *self._outdated(replaced, missing)]
        return await self._publish(missing, replaced, plan)

    async def _publish(
        self, missing: MissingObjects, replaced: list[BadFile], plan: RefPlan
    ) -> Repair:
        final = self.work / "final"
        counts = self.transfer.counts
        await anyio.to_thread.run_sync(make_repository, final)
        borrow_from(final, self.stand_in)
        try:
            await self.transfer.prove(final, whole=not missing)
        except errors.MirrordError:
            # salvaged objects that nothing reaches may refer to objects that never were here
            if missing or not any(name.startswith(SALVAGED) for name in counts):
                raise
            await self.transfer.prove(final, whole=False)
        kept_in = None
        if counts or replaced or plan.restore:
            self._report("put everything in place")
            root = self.donors.mirrors.quarantine.root
            with anyio.CancelScope(shield=True):
                kept_in = await anyio.to_thread.run_sync(
                    publish, self.name, self.git_dir, root, final, replaced, plan
                )
        await self._store_empty_tree()
        return Repair(
            mirror=str(self.name), objects=counts, files=[bad.path for bad in replaced],
            kept_in=str(kept_in) if kept_in else None, refs=sorted(plan.restore),
            unhealed=sorted(missing.all)[:100], unhealed_count=len(missing.all),
            history=self.history, refusals=self.donors.refusals,
        )  # fmt: skip

    async def _store_empty_tree(self) -> None:
        """Write the empty tree, which git (2.39) knows without having it, but misses in fsck.

        So no walk finds it missing, and no donor is asked for it.
        """
        repository = Repository(self.donors.mirrors.git, self.name, self.git_dir)
        await repository.write_object("tree", b"")

    def _report(self, note: str) -> None:
        if self.donors.progress:
            self.donors.progress(Progress(unit="steps", note=f"{self.name}: {note}"))

    async def _find_bad_files(self) -> list[BadFile]:
        bad_files = await self.workers.run(
            find_bad_files, self.git_dir, AuditLevel.CONTENT, timeout=TIMEOUT
        )
        paths = {bad.path for bad in bad_files}
        for name, defect in self.suspects.items():
            path = name if name.startswith("objects/") else f"objects/pack/{name}"
            if path in paths or not is_file(self.git_dir / path):
                continue
            if defect.kind is FindingKind.PACK and name.endswith(".pack"):
                reason = "an object in it is not what its index says"
                bad_files.append(BadFile(path, FileKind.PACK, reason))
            elif defect.kind is FindingKind.DERIVED:
                bad_files.append(BadFile(path, FileKind.DERIVED, defect.reason))
        return bad_files

    async def _salvage(self, bad_files: Collection[BadFile]) -> None:
        """Take the intact objects of damaged packs, needed or not, and make the packs donors.

        A delta in such a pack can be read again once another donor has given its base. Symbolic
        links in the mirror that lead to objects are donors too.
        """
        stems = {Path(bad.path).stem for bad in bad_files if bad.kind in _PACK_KINDS}
        packs = [self.git_dir / f"objects/pack/{stem}.pack" for stem in sorted(stems)]
        for number, pack in enumerate(filter(Path.is_file, packs)):
            self._report(f"salvage {pack.name}")
            name, into = f"{SALVAGED}{pack.name}", self.work / f"salvage-{number}"
            try:
                bad = await self.workers.run(salvage, pack, into, timeout=TIMEOUT)
                await self.transfer.take_all(name, into, bad)
            except (errors.CorruptObjectError, errors.GitFailedError) as error:
                fields = {"mirror": str(self.name), "pack": pack.name, "detail": error.message}
                log.warning("salvage.failed", **fields)
            else:
                borrow_from(into, self.stand_in)
                self.salvaged[pack.stem] = Donor(name, partial(lend, into))
        links = {bad.path for bad in bad_files if is_readable_link(self.git_dir / bad.path)}
        if links:
            others = [bad for bad in bad_files if bad.path not in links]
            linked = self.work / "linked"
            make = partial(make_stand_in, self.git_dir, others, {}, linked, link=os.symlink)
            await anyio.to_thread.run_sync(make)
            donor = Donor("targets of symbolic links", partial(lend, linked))
            self.salvaged["/linked"] = donor  # no pack has such a name

    async def _collect(self, tips: Collection[str]) -> MissingObjects:
        """Ask donors for what is missing, again while a round helps; return what stays missing."""
        missing = await self._missing(tips)
        donors = list(self.salvaged.values())
        if missing:
            donors = [*await self.donors.all(tips), *donors, *self.donors.damaged_packs()]
        while missing:
            left = await self._ask_each(donors, tips, missing)
            if left.all == missing.all:
                return left
            missing = left
        return missing

    async def _ask_each(
        self, donors: Collection[Donor], tips: Collection[str], missing: MissingObjects
    ) -> MissingObjects:
        """Ask each donor in turn, and again while it has something; return what stays missing."""
        for donor in donors:
            while missing:
                self._report(f"{len(missing.all)} objects are missing, ask {donor.name}")
                try:
                    async with donor.lend(missing) as lent:
                        take = self.transfer.take_missing
                        if not lent or not await take(donor.name, lent, missing):
                            break
                except (errors.DiskFullError, errors.StoppingError):
                    raise
                except errors.MirrordError as error:
                    fields = {"donor": donor.name, "code": error.code, "detail": error.message}
                    log.warning("donor.failed", **fields)
                    self.donors.refusals[donor.name] = error.message
                    break
                missing = await self._missing(tips)
        return missing

    async def _missing(self, tips: Collection[str]) -> MissingObjects:
        return await self.workers.run(find_missing, self.stand_in, sorted(tips), timeout=TIMEOUT)

    async def _restart_history(self, refs: Mapping[str, str], plan: RefPlan) -> None:
        """Record the refs as they are, on top of the newest history among the mirror's bundles."""
        stand_in = Repository(self.donors.mirrors.git, self.name, self.stand_in)
        best: tuple[datetime, str, DonorBundle] | None = None
        for bundle in await to_thread.run_sync(self.donors.bundles):
            record = bundle.refs.history
            if record is None or not bundle.is_own:
                continue
            donor = self.donors.donor_of(bundle)
            if await self._ask_each([donor], {record}, await self._missing({record})):
                continue
            try:
                await must_be_history(stand_in, record)
                when = (await list_records(stand_in, limit=1, start=record))[0].at
                if best is None or when > best[0]:
                    best = when, record, bundle
            except errors.MirrordError:
                continue
        name = best[2].name if best else None
        log.warning("history.lost", mirror=str(self.name), record=refs.get(HISTORY), bundle=name)
        parents, why = list[str](), RESTARTED
        self.history = "its records were lost, and no bundle has them; a new one was begun"
        if best:
            when, record, bundle = best
            kept = {f"{KEPT}{oid}": oid for oid in bundle.refs.kept}
            plan.restore |= {ref: oid for ref, oid in kept.items() if ref not in refs}
            parents, why = [record], "continued by a heal"
            self.history = (
                f"its records were lost; continued from those of {when:%Y-%m-%d} in {name}"
            )
        await self._write_history({**refs, **plan.restore}, plan, parents, why)

    async def _write_history(
        self, refs: Mapping[str, str], plan: RefPlan, parents: Sequence[str], why: str
    ) -> None:
        scratch = Repository(self.donors.mirrors.git, self.name, self.work / "history")
        await anyio.to_thread.run_sync(make_repository, scratch.path)
        borrow_from(scratch.path, self.stand_in)
        kept = {ref.removeprefix(KEPT) for ref in refs if ref.startswith(KEPT)}
        plan.restore[HISTORY] = await write_record(
            scratch, followed_refs(dict(refs)), plan.head, [], kept=kept, parents=parents, why=why
        )
        await self.transfer.take_all(_NEW_HISTORY, scratch.path, ())

    def _is_replaceable(self, bad: BadFile, unhealed: Collection[str]) -> bool:
        """True if a file has no object that is still missing, or nothing more can be had from it.

        A damaged pack goes in any case: what could be read of it was salvaged, no git reads the
        rest, and in quarantine it is a donor of later heals. In place it would hide good copies.
        """
        if not unhealed or bad.kind in {FileKind.DERIVED, FileKind.PLANTED, *_PACK_KINDS}:
            return True
        if bad.kind is FileKind.LAYOUT:
            return not is_readable_link(self.git_dir / bad.path)
        return bad.kind is not FileKind.LOOSE or bad.object_id not in unhealed

    def _replaced_refs(self, files: RefFiles, plan: RefPlan) -> list[BadFile]:
        """List the files that restoring refs overwrites, so that they are kept too."""
        listed = {bad.path for bad in files.bad}
        changed = [ref for ref in [*plan.restore, *plan.drop] if ref in files.refs]
        loose = [ref for ref in changed if is_file(self.git_dir / ref) and ref not in listed]
        bad = [BadFile(ref, FileKind.REF, f"it named {files.refs[ref]}") for ref in loose]
        is_packed = "packed-refs" not in listed and exists(self.git_dir / "packed-refs")
        suspect = self.suspects.get("packed-refs")
        if is_packed and (plan.restore or plan.drop or suspect):
            reason = suspect.reason if suspect else "refs are lost from it"
            bad.append(BadFile("packed-refs", FileKind.PACKED_REFS, reason))
        return bad

    def _outdated(
        self, replaced: Collection[BadFile], missing: MissingObjects
    ) -> Iterator[BadFile]:
        """List files that git derived from packs that go, or from lost commits."""
        listed = {bad.path for bad in replaced}
        objects = self.git_dir / "objects"
        files: list[Path] = []
        if any(bad.kind in _PACK_KINDS for bad in replaced):
            files += matching(objects / "pack", "multi-pack-index*")
        is_lying = any(Path(bad.path).name.startswith("commit-graph") for bad in replaced)
        if missing.commits or _NEW_HISTORY in self.transfer.counts or is_lying:
            files += matching(objects / "info/commit-graphs", "*")
            files += matching(objects / "info", "commit-graph")
        for file in files:
            path = str(file.relative_to(self.git_dir))
            if is_file(file) and path not in listed:
                yield BadFile(path, FileKind.DERIVED, "it names packs that go, or lost commits")
