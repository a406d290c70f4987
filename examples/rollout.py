"""A rollout in ten lines: a checkout, commands in a sandbox, the patch. INSTANCE COMMAND…"""

import sys

from mirrord import Client, Sandbox

instance, *commands = sys.argv[1:]
with (
    Client() as client,
    client.checkout(instance, environment="auto", sandbox=True) as checkout,
    Sandbox(checkout) as sandbox,
):
    for command in commands:
        done = sandbox.exec(command, timeout=60)
        print(f"[{done.exit_code}] {command}", file=sys.stderr)
    print(checkout.diff().decode(), end="")
