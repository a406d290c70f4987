"""A search with forks: from one state try several actions, keep what scores best, go on from there.

    rl_loop.py INSTANCE SCORE_COMMAND ROUNDS ACTION…

A fork has all that its parent changed, costs what was changed, and goes at the end of its block.
"""

import sys
from contextlib import ExitStack

from mirrord import Checkout, Client, Sandbox


def score(checkout: Checkout, command: str) -> float:
    """The last word that the command prints; 0 where it fails."""
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
