"""An agent of your own in a sandbox: ask a program for the next command until it has none.

    sandboxed_agent.py INSTANCE AGENT…

AGENT runs on the host, with its keys and its network. It reads the output of the last command on
standard input, and prints the next command; an empty answer ends the rollout. Only the commands
run in the sandbox: as another uid, without a network, with limits.
"""

import subprocess
import sys

from mirrord import Client, Sandbox

MOST_TURNS = 50

instance, *agent = sys.argv[1:]
with (
    Client() as client,
    client.checkout(instance, environment="auto", owner=65534, sandbox=True) as checkout,
    Sandbox(checkout, memory_bytes=2 * 1024**3, processes=256) as sandbox,
):
    seen = b""
    for _turn in range(MOST_TURNS):
        answer = subprocess.run(agent, input=seen, stdout=subprocess.PIPE, check=True).stdout
        if not (command := answer.decode().strip()):
            break
        done = sandbox.exec(command, timeout=60)
        seen = done.stdout + done.stderr + f"\n[{done.struck or done.exit_code}]\n".encode()
    print(checkout.diff().decode(), end="")
