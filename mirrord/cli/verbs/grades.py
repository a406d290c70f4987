"""`mirrord grade`."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ...errors import UsageError
from ...model import ApplyStrategy, FoundStrategy
from ...protocol import Grade
from ...quoting import quote_name
from ..output import table
from ..session import (
    Argument,
    BackendOption,
    HistoryOption,
    Option,
    OwnerOption,
    ParsersOption,
    Session,
    Ttl,
    read_duration,
    read_file,
    read_jobs,
    read_owner,
)
from .checkouts import Attachable, Dataset, Environment, Layer, find_id, print_path

_TARGET_HELP = "Id or path of a checkout; with --patch an instance, or NAME@COMMITISH."
_POLICY_HELP = (
    "report, drop or refuse what could steer the tests, or KIND=… for a kind of rule; repeatable."
)
_PREDICTIONS_HELP = "Grade each prediction of a file, or of a directory of ID.patch."
_RUN_HELP = "Run the tests of each prediction in its instance's environment."
_REPORT_HELP = "Write the results as .jsonl or .html, by the suffix; repeatable."


class PredictionOptions(NamedTuple):
    """How a file of predictions is graded."""

    report: Annotated[list[Path] | None, Option(_REPORT_HELP, "FILE")] = None
    jobs: Annotated[str, Option("Predictions to grade at a time.", "N")] = "8"
    keep: Annotated[
        bool, Option("Keep the checkouts of the predictions; the report lists them.")
    ] = False
    run: Annotated[bool, Option(_RUN_HELP)] = False
    logs: Annotated[Path | None, Option("Directory for the logs of tests (with --run).")] = None
    timeout: Annotated[str, Option("Limit of a run of the tests (with --run).", "DURATION")] = "30m"
    log_parsers: ParsersOption = None

    def grade(self, session: Session, path: Path, **choices: Any) -> None:
        """Grade each prediction, and report them."""
        from .. import predictions  # noqa: PLC0415 - loads asyncio

        jobs = read_jobs(self.jobs)
        run_for = read_duration(self.timeout, "--timeout") if self.run else None
        predictions.grade_all(
            session, path, self.report or [], jobs, keep=self.keep, logs=self.logs,
            run_for=run_for, parsers=self.log_parsers, **choices,
        )  # fmt: skip


def grade(
    session: Session,
    target: Annotated[
        str | None, Argument(_TARGET_HELP, "[ID|INSTANCE]", "checkout or instance")
    ] = None,
    patch: Annotated[
        str | None,
        Option("The agent's change, for an instance; - is standard input.", "FILE", names="file"),
    ] = None,
    predictions: Annotated[Path | None, Option(_PREDICTIONS_HELP, "PATH")] = None,
    strategy: Annotated[
        ApplyStrategy | None,
        Option("How the patch may apply: as git does, or (default) as SWE-bench's grader does."),
    ] = None,
    policy: Annotated[list[str] | None, Option(_POLICY_HELP, "POLICY")] = None,
    dataset: Dataset = None,
    history: HistoryOption = None,
    backend: BackendOption = None,
    ttl: Ttl = None,
    owner: OwnerOption = None,
    attachable: Attachable = False,
    layer: Layer = None,
    environment: Environment = None,
    *,
    of_predictions: PredictionOptions,
) -> None:
    """The tree has the base commit, the content of the agent's change, and the tests. Prints its
    path; changes that could steer the tests are listed on stderr. Run the tests as another user
    than the agent (--owner).

    With --predictions the exit status is 0 if each has a grade, else that of the first without one.
    """
    common: dict[str, Any] = {"policy": ",".join(policy) if policy else None, "backend": backend}
    common |= {"ttl": read_duration(ttl, "--ttl"), "owner": read_owner(owner), "auto_renew": False}
    of_rows: dict[str, Any] = {"dataset": dataset, "history": history}
    of_patch: dict[str, Any] = {"strategy": strategy, "layer": layer, "environment": environment}
    if predictions is not None:
        if target or patch or attachable or any(of_patch.values()):
            hint = "remove the ID, --patch, --layer, --environment, --strategy and --attach"
            raise UsageError("cannot combine --predictions with another target", hint=hint)
        of_predictions.grade(session, predictions, **of_rows, **common)
        return
    if of_predictions.report or of_predictions.keep or of_predictions.run:
        hint = "add --predictions FILE"
        raise UsageError("cannot use --report, --keep or --run without --predictions", hint=hint)
    if target is None:
        hint = "name a checkout, or an instance with --patch, or give --predictions"
        raise UsageError("cannot tell what to grade", hint=hint)
    common["attach"] = attachable
    if patch is not None:
        of_patch["strategy"] = strategy or ApplyStrategy.TOLERANT
        handle = session.client.grade(target, read_file(patch), **of_rows, **of_patch, **common)
    elif options := [name for name, value in ({"history": history} | of_patch).items() if value]:
        fact = f"cannot use --{options[0]} without --patch: a checkout's change is graded as it is"
        raise UsageError(fact, hint="add --patch FILE and name an instance")
    else:
        handle = session.client.grade_checkout(find_id(session, target), dataset=dataset, **common)
    for line in _remarks(handle.report):
        session.note(line)
    print_path(session, handle.report)


def _remarks(grade: Grade) -> list[str]:
    lines: list[str] = []
    if grade.steering:
        rows = [
            (steering.action, steering.rule, quote_name(steering.path), steering.detail)
            for steering in grade.steering
        ]
        lines += table(("ACTION", "RULE", "PATH", "DETAIL"), rows, bold=False)
    if not grade.changed:
        lines.append("the change is empty")
    hows = {"the patch": grade.strategy, "the test patch": grade.tests_strategy}
    lines += (
        f"{name} applied by strategy {how}"
        for name, how in hows.items()
        if how not in (None, FoundStrategy.EXACT)
    )
    lines += grade.notes
    if grade.tests is None:
        lines.append("no tests: it has no instance, or the instance has no test patch")
    if grade.judged_by == "names":
        lines.append("judged by names of paths: no environment said what it loads")
    return lines
