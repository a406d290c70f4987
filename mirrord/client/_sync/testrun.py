# @generated from ../_async/testrun.py by tests/support/unasync.py: edit that file, then run it.
"""Runs of an instance's tests in the sandbox of a checkout with its environment."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ... import errors, protocol
from ...model import shown
from ...sandbox.verdicts import Verdict, judge_run
from ...testlogs import cut_to_tests, find_parser, tells_status
from ..rehearsing import command_of, modules_of

if TYPE_CHECKING:
    from .checkout import Checkout
    from .client import Client


def build_environment(
    client: Client, instance: str, dataset: str | None
) -> tuple[str, protocol.Recipe]:
    """Return the name of an instance's environment, built if missing, and its recipe."""
    ended = client.wait(client.build_environments(instance, dataset=dataset))
    report = protocol.BuildReport.from_json(ended.result)
    for failed in report.failed:
        hint = f"see `mirrord environment log {failed.key}`"
        raise errors.EnvironmentFailedError(failed.detail, hint=hint)
    environment = client.get_environment(report.ready[0])
    recipe = environment.recipe or report.tests
    if recipe is None:
        raise errors.RecipeNotFoundError(
            f"cannot run the tests of {instance}: neither its row nor the swebench package has a"
            " test command",
            hint="add `install_config` with `test_cmd` and `log_parser` to the row",
        )
    if find_parser(recipe.log_parser) is None:
        raise errors.RecipeNotFoundError(
            f"cannot read the log of the tests of {instance}: no parser is named"
            f" {shown(recipe.log_parser)}",
            hint="docs/environments.md lists the parsers; name one in the row's `log_parser`",
        )
    return environment.name, recipe


def run_tests(
    checkout: Checkout,
    row: protocol.Instance,
    recipe: protocol.Recipe,
    timeout: timedelta,
    log_file: Path | None,
) -> tuple[str, Verdict]:
    """Run the tests of a row in the tree of a checkout; returns their log and the verdict.

    Raises DeadlineError if they meet a limit. The log is written to `log_file` in any case,
    and the outcome of each test beside it, to a file of that name with `.json`.
    """
    from .sandbox import Sandbox  # noqa: PLC0415  loaded only to run tests

    frozen = modules_of(row)
    with Sandbox(checkout, variables=recipe.variables, frozen=frozen) as sandbox:
        command, seconds = command_of(recipe, row), timeout.total_seconds()
        ended, report = sandbox.exec_tests(command, timeout=seconds)
    if log_file:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_bytes(ended.stdout)
    if ended.struck:
        raise errors.DeadlineError(
            f"cannot run the tests of {row.id}: they met the limit of {ended.struck}",
            hint="raise --timeout",
        )
    parser = find_parser(recipe.log_parser)
    assert parser is not None  # build_environment looked
    tests = [*(row.fail_to_pass or ()), *(row.pass_to_pass or ())]
    log = cut_to_tests(ended.stdout.decode(errors="replace"))
    status = ended.exit_code if tells_status(recipe.test_command) else None
    verdict = judge_run(recipe.test_command, report, log, status, parser, tests)
    if log_file:
        text = json.dumps(verdict.outcomes, indent=0, sort_keys=True)
        log_file.with_suffix(".json").write_text(f"{text}\n")
    return log, verdict
