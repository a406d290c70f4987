"""`mirrord rehearse`: test instances with this daemon, and report the results."""

from collections import Counter
from collections.abc import Awaitable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any

from ... import protocol
from ...client._async import AsyncClient
from ...client.rehearsing import PATCHES
from ...errors import UsageError
from ...model import FoundStrategy, Readiness
from ...quoting import legible
from ...runs.rehearsals import Results
from .. import running
from ..output import cell, count, listing, size, table
from ..session import (
    Argument,
    NoWait,
    Option,
    OwnerOption,
    ParsersOption,
    Session,
    read_duration,
    read_jobs,
    read_owner,
)
from ..waiting import conclude, exit_as

_REPORT_HELP = "Write the results as a page (.html); repeatable."
_RUN_HELP = "Run the tests in the environment, before and after the gold patch."
_LOGS_HELP = "Directory for the logs of tests (with --run); default: beside the report."
_TIMES_HELP = "Run the tests so many times, and name those that differ (with --run)."
_PREWARM_HELP = "Only build the templates of the dataset's instances, or of these."
_RESUME_HELP = "Write each result to this file, and skip instances whose result still holds."


def rehearse(
    session: Session,
    instances: Annotated[
        list[str] | None, Argument("Instances; default: all.", "[INSTANCE]...", "instance")
    ] = None,
    dataset: Annotated[
        str | None, Option("All instances of this dataset.", "NAME", names="dataset")
    ] = None,
    jobs: Annotated[str, Option("Instances to test at a time.", "N")] = "8",
    report: Annotated[list[Path] | None, Option(_REPORT_HELP, "FILE")] = None,
    resume: Annotated[Path | None, Option(_RESUME_HELP, "FILE")] = None,
    run: Annotated[bool, Option(_RUN_HELP)] = False,
    logs: Annotated[Path | None, Option(_LOGS_HELP, "DIR")] = None,
    timeout: Annotated[str, Option("Limit of a run of the tests.", "DURATION")] = "30m",
    times: Annotated[str, Option(_TIMES_HELP, "N")] = "1",
    log_parsers: ParsersOption = None,
    owner: OwnerOption = None,
    prewarm: Annotated[bool, Option(_PREWARM_HELP)] = False,
    no_wait: NoWait = False,
) -> None:
    """Each instance is checked out and compared with its base commit, its seal is verified, its
    test patch and gold patch are applied and reversed, and it is reset. Recorded commits are
    audited. With --run its environment is built, and its tests must fail and pass as its row says.

    Status 8 if an instance fails. An instance is "ready, but" if it works and another commit of its
    row cannot be served. Ctrl-C releases all checkouts and leaves a report of finished instances.

    With --prewarm nothing is tested: the daemon builds the templates, so that the next checkouts
    are warm. Nothing in use is evicted, so there may be no room for all (status 7). Status 8 if a
    base commit cannot be served. Ctrl-C ends the wait, not the operation.
    """
    if prewarm:
        _prewarm(session, dataset, instances or [], no_wait)
        return
    if no_wait:
        raise UsageError("cannot use --no-wait without --prewarm")
    parallel = read_jobs(jobs)
    tests: dict[str, Any] = {"run": run, "test_timeout": read_duration(timeout, "--timeout")}
    tests |= {"owner": read_owner(owner), "times": read_jobs(times, "--times")}
    tests["parsers"] = log_parsers
    tests["logs"] = _log_directory(logs, [*(report or ()), *([resume] if resume else [])])
    results = Results(report or (), resume)

    async def begin(client: AsyncClient) -> Iterator[Awaitable[protocol.Rehearsed]]:
        rehearsal = await client.rehearsal(*instances or (), dataset=dataset, **tests)
        if not rehearsal.candidates:
            hint = "import a dataset first, or name instances"
            raise UsageError("cannot rehearse: there are no instances", hint=hint)
        chosen = results.choose(rehearsal.candidates)
        # the one that takes the turn of another when that ends
        return map(rehearsal.rehearse, chosen, chain(chosen[parallel:], repeat(None)))

    running.run(session, "rehearse", results, parallel, begin)
    session.answer(results.answer(), _lines(results))
    if status := results.exit_status:
        raise SystemExit(status)


def _prewarm(session: Session, dataset: str | None, instances: list[str], no_wait: bool) -> None:
    if dataset is None:
        raise UsageError("cannot prewarm instances: no dataset is named", hint="add --dataset NAME")
    operation = session.client.prepare_dataset(dataset, *instances)
    exit_as(conclude(session, operation, no_wait, protocol.Prewarmed, _prewarm_lines))


def _prewarm_lines(prewarmed: protocol.Prewarmed) -> Iterator[str]:
    prepared = count(prewarmed.prepared, "commit")
    yield f"{prepared} prepared, {prewarmed.failed} failed, {prewarmed.left} left"


def _log_directory(logs: Path | None, files: list[Path]) -> Path | None:
    """Return the directory for logs; by default it is named after the first of `files`."""
    if logs or not files:
        return logs
    return files[0].with_name(f"{files[0].stem}-logs")


def _lines(results: Results) -> Iterator[str]:
    """Yield the answer as text: counts by repository, then instances that are not ready."""
    totals = results.totals()
    header = ("DATASET", "REPOSITORY", "INSTANCES", *(state.upper() for state in Readiness))
    rows = []
    for group in totals["repositories"]:
        counts = [group["states"].get(state, 0) for state in Readiness]
        rows.append((group["dataset"], group["repo"], sum(counts), *counts))
    yield from table(header, rows)
    yield from _test_lines(totals["repositories"])
    for name in PATCHES:
        if without := sum(g["nothing_to_apply"].get(name, 0) for g in totals["repositories"]):
            yield f"{count(without, 'instance')} without {name}: nothing to apply"
        hows = Counter[str]()
        for group in totals["repositories"]:
            hows.update(group["strategies"][name])
        if hows.keys() - {FoundStrategy.EXACT}:
            by_name = ", ".join(f"{hows[how]:,} {how}" for how in FoundStrategy if hows[how])
            yield f"{name} applied by strategy: {by_name}"
    if bad := results.bad():
        yield ""
        yield from listing(bad, "INSTANCE RESULT=status REASON")
        yield from _unexpected_lines(bad)
    yield from (
        f"{row.instance}: {cell(contradiction)}"
        for row in results.rows
        for contradiction in row.contradictions
    )
    yield from (
        f"{row.instance}: flaky: {cell(test)}" for row in results.rows for test in row.flaky
    )
    for lack in totals["missing"]:
        yield f"{cell(lack['text'])}; {lack['remedy']}"
    if logged := sum(row.verdict == "log" for row in results.rows):
        yield f"{count(logged, 'instance')} judged by the log of its tests alone"
    counted = [
        f"{number:,} {state}"
        for state in Readiness
        if (number := totals["states"].get(state)) and state is not Readiness.FAILED
    ]
    failed = totals["states"].get(Readiness.FAILED) or "none"
    kept = f" ({results.kept_count:,} by an earlier run)" if results.kept_count else ""
    counts_text = "; ".join([*counted, f"{failed} failed"])
    yield f"{count(len(results.rows), 'instance')} rehearsed{kept}: {counts_text}"


def _test_lines(groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what rows whose tests ran came to, and what their environments cost."""
    ran = [group for group in groups if group["environments"]]
    if not ran:
        return
    yield ""
    header = ("DATASET", "REPOSITORY", "FAIL_BEFORE", "RESOLVE", "ENVIRONMENTS", "LEAKS")
    rows = []
    for group in ran:
        passed, has = group["passed"], group["environments"]
        tests = [passed.get(name, 0) for name in ("tests before", "tests after")]
        each_s = group["duration_s"] / sum(group["states"].values())
        sizes = size(has["size_bytes"]), size(has["disk_bytes"]), f"{each_s:.1f}"
        where = group["dataset"], group["repo"]
        rows.append((*where, *tests, has["count"], has["leaking"], *sizes))
    yield from table((*header, "SIZE", "ON_DISK", "SECONDS_A_ROW"), rows)
    yield ""


def _unexpected_lines(rows: list[protocol.Rehearsed]) -> Iterator[str]:
    """Yield unexpected results of tests, with the last lines of their log."""
    for row in rows:
        for test in row.unexpected:
            yield ""
            yield f"{row.instance}: {cell(test.description)}"
            yield from (f"    {legible(line)}" for line in test.lines)
        yield from (f"{row.instance}: log: {path}" for path in row.logs if row.unexpected)
