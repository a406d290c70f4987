"""verifiers: an agent whose harness is a script, on a task with a reward, in a runtime that is lent."""

import asyncio
import json
import os
from typing import Any

from verifiers.v1 import (
    Agent,
    AgentConfig,
    Harness,
    ProgramResult,
    Runtime,
    Task,
    TaskData,
    Trace,
    reward,
)
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.utils.git import capture_patch, resolve_head

from mirrord.integrations.verifiers import open_runtime

ROW = json.loads(os.environ["INSTANCE"])
CHECKOUT = {"environment": "auto"}


class Shapes(Task[TaskData]):
    """Graded in its own box: by its tests, which the agent did not see."""

    NEEDS_CONTAINER = True

    async def finalize(self, trace: Trace, runtime: Runtime) -> None:
        await capture_patch(trace, runtime, base_commit=ROW["base_commit"])

    @reward
    async def solved(self, trace: Trace, runtime: Runtime) -> float:
        await runtime.write("/tmp/test.patch", ROW["test_patch"].encode())
        await runtime.run(["sh", "-c", "git apply ${TMPDIR:-/tmp}/test.patch"], {})
        return float((await runtime.run(["python", "-B", "tests/run.py"], {})).exit_code == 0)


class Scripted(Harness[HarnessConfig]):
    """Does what the prompt says."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Runtime, *_: Any, data: Any = None, **__: Any
    ) -> ProgramResult:
        return await runtime.run(["bash", "-c", trace.task.data.prompt], {"A": "1"})


async def roll_out(prompt: str) -> Trace:
    agent = Agent(AgentConfig(model="none"))
    agent.harness = Scripted(HarnessConfig())
    async with open_runtime(ROW["instance_id"], env={"B": "2"}, checkout=CHECKOUT) as runtime:
        assert await resolve_head(runtime) == ROW["base_commit"]
        assert await runtime.alive()
        await runtime.write("/tmp/long", b"x" * 1000)
        assert await runtime.read("/tmp/long", max_bytes=1000) == b"x" * 1000
        task = Shapes(TaskData(idx=0, prompt=prompt, image=ROW["instance_id"]))
        trace = await agent.run(task, runtime=runtime)
    assert not trace.errors, trace.errors
    Trace.model_validate_json(trace.model_dump_json())
    return trace


async def main() -> dict[str, Any]:
    fix = "sed -i 's,base \\* height,base * height / 2,' shapes/area.py"
    solved, idle = await asyncio.gather(roll_out(fix), roll_out("[ $A$B = 1 ]; true"))
    return {"patch": solved.info.get("patch"), "rewards": [solved.reward, idle.reward]}


print(json.dumps(asyncio.run(main())))
