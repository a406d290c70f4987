"""Runs of an instance's tests in the sandbox of a checkout with its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import errors, protocol
from ...model import shown
from ...sandbox.verdicts import Verdict, judge_run
from ...testlogs import (
    PARSING,
    Parser,
    after_before,
    cut_to_tests,
    find_parser,
    is_scripted,
    tells_status,
    with_parsed,
)
from ..primitives_async import async_in_thread
from ..rehearsing import command_of, modules_of

if TYPE_CHECKING:
    from ...sandbox.calls import Executed
    from .checkout import AsyncCheckout
    from .client import AsyncClient


async def build_environment(
    client: AsyncClient,
    instance: str,
    dataset: str | None,
    parsers: Mapping[str, Parser] | None = None,
) -> tuple[str, protocol.Recipe]:
    """Return the name of an instance's environment, built if missing, and its recipe, whose log
    mirrord or one of `parsers` can read.
    """
    ended = await client.wait(await client.build_environments(instance, dataset=dataset))
    report = protocol.BuildReport.from_json(ended.result)
    for failed in report.failed:
        hint = f"see `mirrord environment log {failed.key}`"
        if failed.missing:  # of the host, and no fault of the row
            missing = [each.to_json() for each in failed.missing]
            raise errors.ResourceError(failed.detail, hint=hint, missing=missing)
        raise errors.EnvironmentFailedError(failed.detail, hint=hint)
    environment = await client.get_environment(report.ready[0])
    recipe = environment.recipe or report.tests
    if recipe is None:
        raise errors.RecipeNotFoundError(
            f"cannot run the tests of {instance}: neither its row nor the swebench package has a"
            " test command",
            hint="add `install_config` with `test_cmd` and `log_parser` to the row",
        )
    if find_parser(recipe.log_parser, parsers) is None:
        raise errors.RecipeNotFoundError(
            f"cannot read the log of the tests of {instance}: no parser is named"
            f" {shown(recipe.log_parser)}",
            hint="name one of docs/environments.md in the row's `log_parser`, or the file that"
            " defines it: --log-parsers FILE",
        )
    return environment.name, recipe


async def run_tests(
    client: AsyncClient,
    checkout: AsyncCheckout,
    row: protocol.Instance,
    recipe: protocol.Recipe,
    timeout: timedelta,
    log_file: Path | None,
    parsers: Mapping[str, Parser] | None = None,
) -> tuple[str, Verdict]:
    """Run the tests of a row in the tree of a checkout; returns their log and the verdict.

    Raises DeadlineError if they meet a limit. The log is written to `log_file` in any case,
    and the outcome of each test beside it, to a file of that name with `.json`.
    """
    from .sandbox import AsyncSandbox  # noqa: PLC0415  loaded only to run tests

    takes_scripts = is_scripted(recipe.test_command)
    scripts = {name: os.fsencode(text) for name, text in (row.scripts or {}).items()}
    parsing = scripts.pop("parsing_script", None) if "run_script" in scripts else None
    frozen, seconds = modules_of(row), timeout.total_seconds()
    async with AsyncSandbox(checkout, variables=recipe.variables, frozen=frozen) as sandbox:
        ended, report = await sandbox.exec_tests(
            command_of(recipe, row), timeout=seconds, files=scripts if takes_scripts else None
        )
    stderr, has_begun = after_before(recipe.test_command, ended.stderr)
    log = (ended.stdout + stderr).decode(errors="replace")
    try:
        _require_time(row, ended)
        if not has_begun:
            said = stderr.decode(errors="replace").strip()[-300:]
            raise errors.ProofFailedError(
                f"cannot run the tests of {row.id}: a command of its before_repo_set_cmd failed:"
                f" {said}",
                hint="it runs in the sandbox, without network and without the gold commit",
            )
        if takes_scripts and parsing:
            files = {"parsing_script": parsing, "stdout": ended.stdout, "stderr": stderr}
            log = with_parsed(log, await _parse(client, checkout.lease, row, files, seconds))
    finally:
        if log_file:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            log_file.write_bytes(log.encode())
    parser = find_parser(recipe.log_parser, parsers)
    assert parser is not None  # build_environment looked
    tests = [*(row.fail_to_pass or ()), *(row.pass_to_pass or ())]
    log = cut_to_tests(log)
    status = ended.exit_code if tells_status(recipe.test_command) else None
    # not on the event loop: the parser may be another's, and the log long
    verdict = await async_in_thread(
        lambda: judge_run(recipe.test_command, report, log, status, parser, tests)
    )
    if log_file:
        text = json.dumps(verdict.outcomes, indent=0, sort_keys=True)
        log_file.with_suffix(".json").write_text(f"{text}\n")
    return log, verdict


def _require_time(row: protocol.Instance, ended: Executed) -> None:
    if ended.struck:
        raise errors.DeadlineError(
            f"cannot run the tests of {row.id}: they met the limit of {ended.struck}",
            hint="raise --timeout",
        )


async def _parse(
    client: AsyncClient,
    lease: protocol.Checkout,
    row: protocol.Instance,
    files: Mapping[str, bytes],
    seconds: float,
) -> str:
    """Return what a row's parsing_script makes of the output of its tests.

    It runs in a checkout of its own: the tests could have left it another Python, or a process.
    """
    from .sandbox import AsyncSandbox  # noqa: PLC0415  loaded only to run tests

    owner = None if lease.owner_uid == os.geteuid() else lease.owner_uid
    options: dict[str, Any] = {"environment": lease.environment, "owner": owner, "sandbox": True}
    clean = client.checkout(row.id, dataset=row.dataset, **options)
    async with clean as other, AsyncSandbox(other) as sandbox:
        ended, _ = await sandbox.exec_tests(PARSING, timeout=seconds, files=files)
    _require_time(row, ended)
    if ended.exit_code or not ended.stdout.strip():
        said = ended.stderr.decode(errors="replace").strip()[-300:]
        raise errors.ProofFailedError(
            f"cannot read the log of the tests of {row.id}: its parsing_script ended with status"
            f" {ended.exit_code}{': ' if said else ''}{said}",
            hint="see the log of the tests; the script runs by the python3 of the image",
        )
    return ended.stdout.decode(errors="replace")
