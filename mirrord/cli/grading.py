"""`mirrord grade`: a grader's checkout of what an agent changed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import UsageError
from ..model import ApplyStrategy
from . import parameters
from .checkouts import Dataset, Environment, Layer, find_id
from .output import table
from .parameters import Argument, Option
from .session import Session, read_file

if TYPE_CHECKING:
    from ..protocol import Grade

_TARGET_HELP = "A checkout's id or path; with --patch an instance, or NAME@COMMITISH."
_POLICY_HELP = (
    "report, drop or refuse what could steer the tests; KIND=… for one kind of rule; repeatable."
)
_PREDICTIONS_HELP = "Grade each prediction of a file as SWE-bench has it, tolerantly."
_REPORT_HELP = "Write what became of the predictions, by suffix: .jsonl or .html; repeatable."
_CONCURRENCY_MAX = 256


def grade(
    session: Session,
    target: Annotated[str | None, Argument(metavar="[ID|INSTANCE]", help=_TARGET_HELP)] = None,
    patch: Annotated[
        str | None, Option(metavar="FILE", help="The change of an instance; - is standard input.")
    ] = None,
    predictions: Annotated[Path | None, Option(metavar="FILE", help=_PREDICTIONS_HELP)] = None,
    strategy: Annotated[
        ApplyStrategy, Option(help="How the patch may apply: as git does, or also with fuzz.")
    ] = ApplyStrategy.EXACT,
    policy: Annotated[list[str] | None, Option(metavar="POLICY", help=_POLICY_HELP)] = None,
    dataset: Dataset = None,
    history: parameters.HistoryOption = None,
    backend: parameters.BackendOption = None,
    ttl: parameters.Ttl = None,
    owner: parameters.OwnerOption = None,
    layer: Layer = None,
    environment: Environment = None,
    report: Annotated[list[Path] | None, Option(metavar="FILE", help=_REPORT_HELP)] = None,
    concurrency: Annotated[str, Option(metavar="N", help="How many predictions at a time.")] = "8",
    keep: Annotated[
        bool, Option("--keep", help="Keep the predictions' grades; the report names them.")
    ] = False,
) -> None:
    """The tree has the base commit, the agent's change by its content alone, and the tests.

    What in the change could steer the tests is listed on stderr. Run the tests as another user
    than the agent was: --owner. The status of --predictions is 0 when each has a grade, else that
    of the first without one.
    """
    common: dict[str, Any] = {
        "policy": ",".join(policy) if policy else None,
        "backend": backend,
        "ttl": parameters.read_duration(ttl, "--ttl"),
        "owner": parameters.read_owner(owner),
        "auto_renew": False,
    }
    if predictions is not None:
        if target or patch or layer or environment or strategy is not ApplyStrategy.EXACT:
            hint = "leave out the ID, --patch, --layer, --environment and --strategy"
            raise UsageError("cannot grade predictions and something else", hint=hint)
        if not concurrency.isdecimal() or not 0 < int(concurrency) <= _CONCURRENCY_MAX:
            hint = f"give a number from 1 to {_CONCURRENCY_MAX}"
            raise UsageError(f"cannot read --concurrency {concurrency}", hint=hint)
        many = importlib.import_module(".predictions", __package__)  # loads asyncio, for this alone
        many.grade_all(
            session,
            predictions,
            dataset=dataset,
            reports=report or [],
            concurrency=int(concurrency),
            keep=keep,
            history=history,
            **common,
        )
        return
    if report or keep:
        hint = "they are for --predictions"
        raise UsageError("cannot take --report or --keep without predictions", hint=hint)
    if target is None:
        hint = "name a checkout, or an instance with --patch, or give --predictions"
        raise UsageError("cannot tell what to grade", hint=hint)
    if patch is None:
        if dataset or history or layer or environment or strategy is not ApplyStrategy.EXACT:
            hint = "leave out --dataset, --history, --layer, --environment and --strategy, or give"
            hint += " --patch with an instance"
            raise UsageError("cannot grade a checkout with options of a patch", hint=hint)
        handle = session.client.grade_checkout(find_id(session, target), **common)
    else:
        choices: dict[str, Any] = {"dataset": dataset, "history": history, "strategy": strategy}
        choices |= {"layer": layer, "environment": environment}
        handle = session.client.grade(target, read_file(patch), **choices, **common)
    for line in _noticed(handle.report):
        session.note(line)
    session.answer(handle.report, [handle.report.path])


def _noticed(grade: Grade) -> list[str]:
    lines: list[str] = []
    if grade.steering:
        rows = [(each.action, each.rule, each.path, each.detail) for each in grade.steering]
        lines += table(("ACTION", "RULE", "PATH", "DETAIL"), rows)
    if not grade.changed:
        lines.append("the change is empty")
    if grade.tests is None:
        lines.append("no tests: the checkout is of no instance, or that has no test patch")
    return lines
