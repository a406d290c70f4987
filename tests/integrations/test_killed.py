"""A harness that is killed leaves neither a checkout nor a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness_daemon import INSTANCE, HarnessLab
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.root]

PROGRAM = f"""
import asyncio
from mirrord.integrations import open_sandbox
async def main():
    async with open_sandbox({INSTANCE!r}) as sandbox:
        print("open", flush=True)
        await sandbox.exec("sleep 600")
asyncio.run(main())
"""


def test_its_checkout_goes_with_it(lab: HarnessLab) -> None:
    variables = {**os.environ, "MIRRORD_SOCKET": str(lab.running.socket)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as harness:
        assert harness.stdout is not None
        assert harness.stdout.readline() == b"open\n"
        assert len(lab.client.list_checkouts()) == 1
        harness.kill()
    until(lambda: lab.client.list_checkouts() == [])
