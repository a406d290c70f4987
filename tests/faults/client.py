"""A client with a uid of its own, for the crowd: checks out, looks, writes, resets, releases. `python -m faults.client`.

Reads its orders as JSON from stdin and ends with a line of JSON: how often it went well, and what was wrong.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from gitrepos import git

from mirrord import Client
from mirrord.errors import CheckoutBusyError, MirrordError, TooManyCheckoutsError


def main() -> None:
    orders = json.load(sys.stdin)
    done, wrong = 0, ""
    choices = random.Random(orders["seed"])
    end = time.monotonic() + orders["duration_s"]
    with Client(orders["socket"]) as client:
        while time.monotonic() < end and not wrong:
            try:
                _use(client, orders["trees"], choices)
                done += 1
            except (CheckoutBusyError, TooManyCheckoutsError):
                continue
            except (MirrordError, AssertionError, OSError) as error:
                wrong = repr(error)
    print(json.dumps({"done": done, "wrong": wrong}))


def _use(client: Client, trees: dict[str, str], choices: random.Random) -> None:
    commit = choices.choice(sorted(trees))
    with client.checkout(f"o__r@{commit}") as checkout:
        must_be(Path(checkout.path), commit, trees)
        (Path(checkout.path) / "README").write_text("a user's\n")
        checkout.reset()
        must_be(Path(checkout.path), commit, trees)


def must_be(tree: Path, commit: str, trees: dict[str, Any]) -> None:
    assert git(tree, "rev-parse", "HEAD") == commit, "a wrong commit"
    assert git(tree, "write-tree") == trees[commit], "a wrong tree"
    assert git(tree, "status", "--porcelain") == "", "a tree that is not clean"


if __name__ == "__main__":
    main()
