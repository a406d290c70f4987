"""Grade predictions: apply each patch, run a test command, print which ones pass.

    grade_predictions.py PREDICTIONS.jsonl TEST_COMMAND

The tests run in a grade: the base commit, the model's change by content, the hidden tests.
"""

import json
import sys
from pathlib import Path

from mirrord import Client, InvalidPatchError, PatchConflictError, Sandbox

file, test = sys.argv[1:]
with Client() as client:
    for line in Path(file).read_text().splitlines():
        row = json.loads(line)
        instance, patch = row["instance_id"], row["model_patch"]
        try:
            graded = client.grade(instance, patch, environment="auto", sandbox=True)
            with graded as grade, Sandbox(grade) as sandbox:
                passed = sandbox.exec(test, timeout=600).exit_code == 0
                doubts = [finding.rule for finding in grade.steering]
        except (InvalidPatchError, PatchConflictError) as error:
            passed, doubts = False, [error.message]
        print(json.dumps({"instance_id": instance, "passed": passed, "steering": doubts}))
