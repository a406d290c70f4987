"""`mirrord grade`: a grader's checkout of what an agent changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ..errors import UsageError
from ..model import ApplyStrategy
from . import parameters
from .checkouts import Dataset, find_id
from .output import table
from .parameters import Argument, Option
from .session import Session, read_file

if TYPE_CHECKING:
    from ..protocol import Grade

_TARGET_HELP = "A checkout's id or path; with --patch an instance, or NAME@COMMITISH."
_POLICY_HELP = (
    "report, drop or refuse what could steer the tests; KIND=… for one kind of rule; repeatable."
)


def grade(
    session: Session,
    target: Annotated[str, Argument(metavar="ID|INSTANCE", help=_TARGET_HELP)],
    patch: Annotated[
        str | None, Option(metavar="FILE", help="The change of an instance; - is standard input.")
    ] = None,
    strategy: Annotated[
        ApplyStrategy, Option(help="How the patch may apply: as git does, or also with fuzz.")
    ] = ApplyStrategy.EXACT,
    policy: Annotated[list[str] | None, Option(metavar="POLICY", help=_POLICY_HELP)] = None,
    dataset: Dataset = None,
    history: parameters.HistoryOption = None,
    backend: parameters.BackendOption = None,
    ttl: parameters.Ttl = None,
    owner: parameters.OwnerOption = None,
) -> None:
    """The tree has the base commit, the agent's change by its content alone, and the tests.

    What in the change could steer the tests is listed on stderr. Run the tests as another user
    than the agent was: --owner.
    """
    common: dict[str, Any] = {
        "policy": ",".join(policy) if policy else None,
        "backend": backend,
        "ttl": parameters.read_duration(ttl, "--ttl"),
        "owner": parameters.read_owner(owner),
        "auto_renew": False,
    }
    if patch is None:
        if dataset or history or strategy is not ApplyStrategy.EXACT:
            hint = "leave out --dataset, --history and --strategy, or give --patch with an instance"
            raise UsageError("cannot grade a checkout with options of a patch", hint=hint)
        handle = session.client.grade_checkout(find_id(session, target), **common)
    else:
        choices: dict[str, Any] = {"dataset": dataset, "history": history, "strategy": strategy}
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
