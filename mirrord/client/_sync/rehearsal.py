# @generated from ../_async/rehearsal.py by tests/support/unasync.py: edit that file, then run it.
"""Rehearsals: test that instances work, each from its mirror to a reset.

A rehearsal does what a grader does: a checkout, both patches and their reverse, a diff, a reset.
Mirrors are audited once for all instances, at level closure unless a recent audit did so. Tests run
in a sandbox of this process, in a checkout with the instance's environment.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import errors, protocol
from ...model import AuditLevel, Bind, CommitState, FoundStrategy, History, View, utc_now
from ...presence import exists
from ...sandbox.verdicts import Verdict
from ...testlogs import read_parsers
from .. import rehearsing
from .testrun import build_environment, run_tests

if TYPE_CHECKING:
    from .checkout import Checkout
    from .client import Client

# after an older one the rehearsal starts an audit at level closure, else a quick one
_AUDIT_MAX_AGE = timedelta(hours=1)
# of a rehearsal's checkout, plus twice the time of its tests where they run
_TTL = timedelta(minutes=30)


class Rehearsal:
    """The instances of a rehearsal, `candidates`, with facts about their mirrors.

    Candidates are ordered by date, so that templates are built from those of near commits.

        rehearsal = mirrord.rehearsal(dataset="verified")
        for candidate in rehearsal.candidates:
            print(rehearsal.rehearse(candidate))
    """

    def __init__(
        self,
        client: Client,
        *,
        run: bool,
        logs: Path | None,
        test_timeout: timedelta,
        owner: int | None,
        times: int,
        parsers: Path | None,
    ) -> None:
        self._client, self._owner, self._times = client, owner, times
        self._run, self._logs, self._test_timeout = run, logs, test_timeout
        self._parsers, self._read_by = None, ""
        if parsers:
            self._parsers = read_parsers(parsers)
            self._read_by = hashlib.sha256(parsers.read_bytes()).hexdigest()
        self._bind = Bind.PROCESS
        self._mirrors: dict[str, protocol.Mirror] = {}
        self._audit: protocol.Operation | None = None
        self._problems: dict[tuple[str, str], str] | None = None
        self.candidates: list[rehearsing.Candidate] = []

    def prepare(self, instances: Sequence[str], dataset: str | None) -> None:
        """Read the rows and start the audit of their mirrors."""
        client = self._client
        self._mirrors = {mirror.name.lower(): mirror for mirror in client.list_mirrors()}
        version = (client.health()).version
        keys: list[tuple[str, str | None]] = [(instance, dataset) for instance in instances]
        if not keys:
            datasets = [] if dataset else client.list_datasets()
            for name in [dataset] if dataset else [listed.name for listed in datasets]:
                keys += [(instance.id, name) for instance in client.list_instances(name)]
        candidates = [self._read(*key, version) for key in dict.fromkeys(keys)]
        self.candidates = sorted(candidates, key=lambda row: (row.created_at, row.instance))
        wanted = {row.mirror.lower() for row in candidates if row.mirror}
        names = sorted(self._mirrors[key].name for key in wanted if self._is_mirrored(key))
        if names:
            level = AuditLevel.QUICK if self._were_audited(names) else AuditLevel.CLOSURE
            self._audit = client.start_audit(*names, level=level, heal=False)

    def _read(self, instance: str, dataset: str | None, version: str) -> rehearsing.Candidate:
        try:
            row = self._client.get_instance(instance, view=View.GRADER, dataset=dataset)
        except rehearsing.FATAL:
            raise
        except errors.MirrordError as error:
            return rehearsing.Candidate(instance, dataset, error=error)
        mirror = self._mirrors.get(row.mirror.lower())
        synced = mirror.synced_at.isoformat() if mirror and mirror.synced_at else ""
        inputs = [row.to_json(), synced, version, *(["run", self._read_by] if self._run else [])]
        patches = dict(zip(rehearsing.PATCHES, (row.test_patch, row.patch), strict=True))
        return rehearsing.Candidate(
            instance=row.id,
            dataset=row.dataset,
            mirror=row.mirror,
            repo=row.repo,
            base_commit=row.base_commit,
            commits=tuple(row.commits or ()),
            patches=tuple(name for name, patch in patches.items() if patch and patch.strip()),
            history=row.history,
            lacking=rehearsing.lacking(row),
            created_at=row.created_at.isoformat() if row.created_at else "",
            state=hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32],
        )

    def _is_mirrored(self, mirror: str) -> bool:
        mirrored = self._mirrors.get(mirror.lower())
        return mirrored is not None and mirrored.synced_at is not None

    def _were_audited(self, names: Sequence[str]) -> bool:
        """True if a recent audit, after the last syncs, checked all closures of these mirrors."""
        synced = [self._mirrors[name.lower()].synced_at for name in names]
        latest = max([utc_now() - _AUDIT_MAX_AGE, *filter(None, synced)])
        return any(
            audit.level is not AuditLevel.QUICK
            and audit.dataset is None
            and audit.started_at > latest
            and not audit.left
            and {*names} <= {*audit.mirrors}
            for audit in self._client.list_audits()
        )

    def _find_problems(self) -> dict[tuple[str, str], str]:
        """Return why recorded commits cannot be served, by mirror (lower case) and commit."""
        if self._problems is None and self._audit is not None:
            ended = self._client.wait(self._audit)
            audit = self._client.get_audit(str((ended.result or {})["id"]))
            self._problems = {
                (finding.mirror.lower(), finding.commit): finding.detail or str(finding.kind)
                for finding in audit.findings
                if finding.commit and finding.state is not CommitState.OK
            }
        return self._problems or {}

    # -- one instance ------------------------------------------------------------------------------

    def rehearse(
        self, candidate: rehearsing.Candidate, following: rehearsing.Candidate | None = None
    ) -> protocol.Rehearsed:
        """Rehearse an instance. Its failures are in the answer; raises if none can be rehearsed.

        While its tests run, the environment of a `following` one is built.
        """
        began = time.perf_counter()
        record = rehearsing.Record()
        try:
            self._try(candidate, following, record)
        except rehearsing.FATAL:
            raise
        except errors.MirrordError as error:
            record.error = record.error or error
        return protocol.Rehearsed(
            instance=candidate.instance,
            dataset=candidate.dataset,
            repo=candidate.repo,
            commit=candidate.base_commit,
            status=record.status,
            reason=record.reason,
            steps=record.steps,
            error=record.problem,
            state=candidate.state,
            environment=record.environment,
            unexpected=record.unexpected,
            verdict=record.verdict,
            contradictions=record.contradictions,
            flaky=record.flaky,
            missing=record.missing,
            weighed=record.weighed,
            logs=record.logs,
            duration_s=round(time.perf_counter() - began, 6),
        )

    def _try(
        self,
        candidate: rehearsing.Candidate,
        following: rehearsing.Candidate | None,
        record: rehearsing.Record,
    ) -> None:
        if candidate.error:
            record.is_known = False
            raise candidate.error
        with record.step("mirrored", needed=True):
            if not self._is_mirrored(candidate.mirror):
                mirror = self._mirrors.get(candidate.mirror.lower())
                reason = mirror.error.detail if mirror and mirror.error else "it was never synced"
                raise errors.MirrorNotFoundError(
                    f"cannot rehearse {candidate.instance}: {candidate.mirror} is not mirrored:"
                    f" {reason}",
                    hint=f"run `mirrord mirror add {candidate.repo}`",
                )
        with record.step("checkout", needed=True):
            checkout = self._check_out(candidate)
        with checkout:
            self._try_tree(checkout, candidate, record)
        self._judge_commits(candidate, record)
        if candidate.lacking:
            record.add("content", "but", "; ".join(candidate.lacking))
        if self._run and record.error is None:
            self._run_tests(candidate, following, record)

    def _check_out(self, candidate: rehearsing.Candidate, **options: Any) -> Checkout:
        choices: dict[str, Any] = {"dataset": candidate.dataset, "view": View.GRADER, "ttl": _TTL}
        choices |= options | {"owner": self._owner, "sandbox": True}
        choices |= {"auto_renew": False, "history": candidate.history}  # agents have this history
        try:
            return self._client.checkout(candidate.instance, bind=self._bind, **choices)
        except errors.ProcessGoneError:  # the daemon cannot see this process
            self._bind = Bind.LEASE
            return self._client.checkout(candidate.instance, **choices)

    def _try_tree(
        self, checkout: Checkout, candidate: rehearsing.Candidate, record: rehearsing.Record
    ) -> None:
        """Run all checks, even after failures of others that they do not need.

        An empty diff proves both that the tree was that of its commit, and that exact patches were
        reversed.
        """
        with record.step("seal"):
            report = self._client.get_seal(checkout.id)
            if not report.sealed:
                leaks = "; ".join(f"{leak.kind}: {leak.detail}" for leak in report.leaks[:3])
                raise errors.ProofFailedError(f"cannot prove the seal: {leaks}")
        applied, is_exact = list[str](), True
        for named in rehearsing.PATCHES:
            if named not in candidate.patches:
                record.add(named, "nothing", "the row has none: nothing to apply")
                continue
            with record.step(named) as step:
                answer = self._client.apply_patch(checkout.id, named)
                step.strategy, step.notes = answer.strategy, answer.notes
                applied.append(named)
                is_exact &= step.strategy is FoundStrategy.EXACT
        with record.step("tree"):
            rehearsing.require_equal("its commit", checkout.commit, candidate.base_commit)
            if is_exact:
                for named in reversed(applied):
                    checkout.apply(named, reverse=True)
            else:  # what its files have and the patch has not is not put back by the reverse
                checkout.reset()
            _must_be_clean(checkout, applied)
        with record.step("reset"):
            # so that the reset has something to undo: the tree is clean here
            for named in applied[:1]:
                checkout.apply(named)
            proof = checkout.reset()
            rehearsing.require_equal("the tree after the reset", proof.tree, checkout.tree)
            if checkout.history is not History.SQUASHED:
                rehearsing.require_equal("HEAD after the reset", proof.head, checkout.commit)

    def _judge_commits(self, candidate: rehearsing.Candidate, record: rehearsing.Record) -> None:
        """Add what the audit found; the checkout has already proven the base commit."""
        problems = self._find_problems()
        key = candidate.mirror.lower()
        faults = [
            f"its {commit.role} commit {commit.commit} cannot be served: {problem}"
            for commit in candidate.commits
            if (problem := problems.get((key, commit.commit)))
        ]
        record.add("recorded", "but" if faults else "ok", "; ".join(faults))

    # -- its tests ---------------------------------------------------------------------------------

    def _run_tests(
        self,
        candidate: rehearsing.Candidate,
        following: rehearsing.Candidate | None,
        record: rehearsing.Record,
    ) -> None:
        """Run the tests with the test patch alone, then with the gold patch too."""
        identity, dataset = candidate.instance, candidate.dataset
        row = self._client.get_instance(identity, view=View.GRADER, dataset=dataset)
        with record.step("environment", needed=True):
            rehearsing.require_lists(row)
            record.environment, recipe = build_environment(
                self._client, identity, dataset, self._parsers
            )
        if following and following.error is None:
            with suppress(errors.MirrordError):  # its own turn says why
                self._client.build_environments(following.instance, dataset=following.dataset)
        try:
            self._run_phases(candidate, row, recipe, record)
        finally:  # the scan of an image may run beside its first tests
            found = self._client.get_environment(str(record.environment))
            record.weighed = rehearsing.weigh(found, candidate.base_commit)
            record.lacks += found.missing

    def _run_phases(
        self,
        candidate: rehearsing.Candidate,
        row: protocol.Instance,
        recipe: protocol.Recipe,
        record: rehearsing.Record,
    ) -> None:
        ttl = _TTL + 2 * self._times * self._test_timeout
        options = {"environment": record.environment, "ttl": ttl}
        with self._check_out(candidate, **options) as checkout:
            for phase in rehearsing.PHASES:
                if missing := set(phase.patches) - {*candidate.patches, rehearsing.PATCHES[0]}:
                    record.add(phase.step, "nothing", f"the row has no {missing.pop()}")
                    continue
                with record.step(phase.step) as step:
                    runs = []
                    for number in range(self._times):
                        checkout.reset()
                        for named in phase.patches:
                            if named in candidate.patches:
                                checkout.apply(named)
                        name = f"{phase.step} {number + 1}" if number else phase.step
                        runs.append(self._run_once(name, checkout, row, recipe, record))
                    if phase is rehearsing.PHASES[-1]:
                        record.lacks += rehearsing.needs_of(runs[0][0])
                    _judge(phase, row, runs, record, step)

    def _run_once(
        self,
        name: str,
        checkout: Checkout,
        row: protocol.Instance,
        recipe: protocol.Recipe,
        record: rehearsing.Record,
    ) -> tuple[str, Verdict]:
        """Run the tests, and keep their log by `name`; return it and its verdict."""
        path = rehearsing.log_path(self._logs, row.id, name) if self._logs else None
        try:
            limit, parsers = self._test_timeout, self._parsers
            return run_tests(self._client, checkout, row, recipe, limit, path, parsers)
        finally:
            if path and exists(path):
                record.logs.append(str(path))


def _judge(
    phase: rehearsing.Phase,
    row: protocol.Instance,
    runs: Sequence[tuple[str, Verdict]],
    record: rehearsing.Record,
    step: rehearsing.Step,
) -> None:
    """Judge the runs of a phase: the first one, but for tests that differ between them.

    Raises ProofFailedError for unexpected results.
    """
    log, verdict = runs[0]
    record.add_verdict(phase.step, verdict)
    if flaky := rehearsing.find_flaky(row, [each.outcomes for _, each in runs]):
        record.flaky += (f"{phase.step}: {test}" for test in flaky)
        step.notes = [f"{len(flaky)} tests pass in some runs only, such as {flaky[0]}"]
        row = replace(
            row,
            fail_to_pass=[test for test in row.fail_to_pass or () if test not in flaky],
            pass_to_pass=[test for test in row.pass_to_pass or () if test not in flaky],
        )
    unexpected, fact = rehearsing.judge_tests(phase, row, verdict.outcomes, log)
    record.unexpected += unexpected
    if fact:
        raise errors.ProofFailedError(f"cannot confirm the row: {fact}")


def _must_be_clean(checkout: Checkout, applied: Sequence[str]) -> None:
    if patch := checkout.diff():
        when = f"after {' and '.join(applied)} were reversed" if applied else "after its checkout"
        text = patch.decode(errors="replace")
        paths = ", ".join(sorted({*re.findall(r"^diff --git a/(\S+)", text, re.MULTILINE)}))
        fact = f"cannot prove the tree equal to its base commit {when}: {paths[:200]} differ"
        raise errors.ProofFailedError(fact)
