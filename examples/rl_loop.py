"""A search with forks: try several actions from one state, keep the best, continue from it.

    rl_loop.py INSTANCE SCORE_COMMAND ROUNDS ACTION…

A fork has all changes of its parent, costs as much as these, and is released with its block.
"""

import sys
from contextlib import ExitStack

from mirrord import Checkout, Client, Sandbox


def score(checkout: Checkout, command: str) -> float:
    """Return the last word of the command's output as a number, or 0 if the command fails."""
    with Sandbox(checkout) as sandbox:
        done = sandbox.exec(command, timeout=60)
    return float(done.stdout.split()[-1]) if done.exit_code == 0 else 0.0


instance, measure, rounds, *actions = sys.argv[1:]
with Client() as client, client.checkout(instance) as state:
    best = score(state, measure)
    for _ in range(int(rounds)):
        with ExitStack() as stack:
            tried: list[tuple[float, bytes]] = []
            for action in actions:
                fork = stack.enter_context(state.fork())
                with Sandbox(fork) as sandbox:
                    sandbox.exec(action, timeout=60)
                tried.append((score(fork, measure), fork.diff()))
        reward, patch = max(tried)
        if reward <= best:
            break
        best = reward
        state.reset()
        state.apply(patch)
    print(f"{best} after the best of {len(actions)} actions", file=sys.stderr)
    print(state.diff().decode(), end="")
