"""swe-rex: a deployment with a session, files and commands."""

import asyncio
import json
import os

from swerex.exceptions import CommandTimeoutError, NonZeroExitCodeError
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from mirrord.integrations.swe_rex import MirrordDeployment

ROW = json.loads(os.environ["INSTANCE"])
FIX = "sed -i 's,base \\* height,base * height / 2,' area.py"


async def main() -> dict[str, object]:
    deployment = MirrordDeployment(ROW["instance_id"], checkout={"environment": "auto"})
    await deployment.start()
    assert await deployment.is_alive()
    runtime = deployment.runtime
    await runtime.create_session(CreateBashSessionRequest())

    async def run(command: str, **options: object) -> str:
        done = await runtime.run_in_session(BashAction(command=command, **options))
        return str(done.output)

    # a session keeps its directory, variables and functions
    tree = (await run("pwd")).strip()
    assert tree == os.environ.get("TREE", tree), tree
    assert (await run("python -c 'import tiny; print(tiny.x)'")).strip() == "1"
    await run("cd shapes; export A=1; f() { echo $A$1; }")
    assert (await run("f 2; pwd")).split() == ["12", f"{tree}/shapes"]
    done = await runtime.run_in_session(BashAction(command="cat; (exit 7)", check="silent"))
    assert done.exit_code == 7 and not done.output.strip(), done
    try:
        await run("false")
    except NonZeroExitCodeError:
        pass
    else:
        raise AssertionError("no error")
    try:
        await run("echo begun; sleep 60", timeout=0.5)
    except CommandTimeoutError:
        pass
    else:
        raise AssertionError("no error")
    interrupted = await runtime.run_in_session(BashInterruptAction())
    assert "begun" not in interrupted.output or interrupted.output.count("begun") == 1
    assert (await run("echo on")).strip() == "on"
    await run(FIX)
    patch = await run("git diff")
    await runtime.close_session(CloseBashSessionRequest())

    # files and commands of their own
    await runtime.write_file(WriteFileRequest(path="/tmp/a/b", content="ü"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/a/b"))).content == "ü"
    os.makedirs("up/down", exist_ok=True)
    with open("up/down/file", "w") as file:
        file.write("deep")
    await runtime.upload(UploadRequest(source_path="up", target_path="/tmp/up"))
    shown = await runtime.execute(
        Command(command="cat up/down/file; echo e >&2", shell=True, cwd="/tmp")
    )
    assert (shown.stdout, shown.stderr, shown.exit_code) == ("deep", "e\n", 0), shown
    listed = await runtime.execute(Command(command=["ls", "/nowhere"], merge_output_streams=True))
    assert listed.exit_code == 2 and "nowhere" in listed.stdout
    await deployment.stop()
    return {"patch": patch}


print(json.dumps(asyncio.run(main())))
