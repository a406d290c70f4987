"""inspect-ai: its conformance suite for sandboxes, then an evaluation with its mock model and a scorer that grades."""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import sandbox
from inspect_ai.util._sandbox import self_check

from mirrord import AsyncClient, AsyncSandbox
from mirrord.integrations.inspect import MirrordSandboxEnvironment

ROW = json.loads(os.environ["INSTANCE"])
METADATA = {"instance_id": ROW["instance_id"]}
NO_OTHER_USER = {"test_exec_as_user"}


async def conform() -> list[str]:
    """The checks that failed, each in a sandbox of its own."""
    checks = {
        name: check
        for name, check in vars(self_check).items()
        if name.startswith("test_") and name not in NO_OTHER_USER
    }
    assert len(checks) > 30, "the suite of inspect-ai is elsewhere"
    chosen = [name for name in checks if os.environ.get("CHECKS", "") in name]
    turns = asyncio.Semaphore(8)

    async def fault(name: str) -> str | None:
        async with turns:
            made = await MirrordSandboxEnvironment.sample_init(name, None, METADATA)
            try:
                await checks[name](made["default"])
            except (Exception, AssertionError) as error:
                return f"{name}: {error!r}"
            finally:
                await MirrordSandboxEnvironment.sample_cleanup(name, None, made, interrupted=False)
        return None

    return [found for found in await asyncio.gather(*map(fault, chosen)) if found]


@scorer(metrics=[accuracy()])
def hidden_tests() -> Scorer:
    """A grade: the agent's change and the instance's tests, in another sandbox."""

    async def score(state: TaskState, target: Target) -> Score:
        checkout = sandbox().as_type(MirrordSandboxEnvironment).sandbox.checkout
        patch = (await checkout.diff()).decode()
        async with (
            AsyncClient() as client,
            client.grade(
                ROW["instance_id"], patch=patch, environment="auto", sandbox=True
            ) as grade,
            AsyncSandbox(grade) as box,
        ):
            done = await box.exec("python -B tests/run.py")
        return Score(value="C" if done.exit_code == 0 else "I", answer=patch)

    return score


def script(messages: Any, *_: Any) -> ModelOutput:
    """Apply what the prompt holds, in two turns."""
    if any(message.role == "tool" for message in messages):
        output = ModelOutput.from_content("mockllm/model", "done")
        output.usage = ModelUsage()  # otherwise it counts tokens, with a table from the network
        return output
    prompt = next(message.text for message in messages if message.role == "user")
    packed = base64.b64encode(prompt.encode()).decode()
    command = {"command": f"echo {packed} | base64 -d | git apply --allow-empty -"}
    output = ModelOutput.for_tool_call("mockllm/model", "bash", command)
    output.usage = ModelUsage()
    return output


def main() -> dict[str, Any]:
    if failed := asyncio.run(conform()):
        sys.exit("\n".join(failed))
    samples = [
        Sample(id="gold", input=ROW["patch"], target="", metadata=METADATA),
        Sample(id="nothing", input="\n", target="", metadata=METADATA),
    ]
    Path("sandbox.json").write_text('{"checkout": {"environment": "auto"}}')
    task = Task(
        dataset=samples,
        solver=[use_tools(bash()), generate()],
        scorer=hidden_tests(),
        sandbox=("mirrord", "sandbox.json"),
    )
    model = get_model("mockllm/model", custom_outputs=script)
    (log,) = evaluate(task, model=model, log_dir="logs", display="none")
    assert log.status == "success", log.error
    scores = {sample.id: sample.scores["hidden_tests"] for sample in log.samples or []}
    return {
        "patch": scores["gold"].answer,
        "grades": {name: score.value for name, score in scores.items()},
    }


print(json.dumps(main()))
