"""NeMo Gym's own sandbox API over the provider that it finds by its entry point."""

import asyncio
import json
import os
from pathlib import Path

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec, SandboxStatus

ROW = json.loads(os.environ["INSTANCE"])


async def main() -> dict[str, object]:
    spec = SandboxSpec(
        metadata={"instance_id": ROW["instance_id"]},
        workdir="/testbed",
        env={"COLOUR": "red"},
        files={"/tmp/patch.diff": ROW["patch"]},
    )
    sandbox = AsyncSandbox({"mirrord": {"checkout": {"environment": "auto"}}})
    await sandbox.start(spec)
    said = await sandbox.exec("pwd; echo $COLOUR; git rev-parse HEAD; exit 3")
    assert said.stdout.split() == ["/testbed", "red", ROW["base_commit"]], said
    assert said.return_code == 3
    late = await sandbox.exec("sleep 60", timeout_s=0.5)
    assert late.error_type == "timeout", late
    assert (await sandbox.exec("python -c 'import tiny'")).return_code == 0
    assert (await sandbox.exec("git apply /tmp/patch.diff")).return_code == 0
    Path("note").write_text("x")
    await sandbox.upload("note", "/tmp/note")
    await sandbox.exec("git diff > /tmp/out; cat /tmp/note >> /tmp/out")
    await sandbox.download("/tmp/out", "out")
    assert await sandbox.status() is SandboxStatus.RUNNING
    await sandbox.stop()
    return {"patch": Path("out").read_text().removesuffix("x")}


print(json.dumps(asyncio.run(main())))
