"""64 concurrent rollouts in one process; each works, is reset, and works again.

crowd.py INSTANCE COMMAND [HOW_MANY]
"""

import asyncio
import sys

from mirrord import AsyncClient, AsyncSandbox


async def roll_out(client: AsyncClient, instance: str, command: str) -> int:
    """Run two episodes in one checkout; return how many made the same change as the first."""
    async with client.checkout(instance, environment="auto", sandbox=True) as checkout:
        sandbox = AsyncSandbox(checkout)
        await sandbox.exec(command, timeout=120)
        first = await checkout.diff()
        await sandbox.reset()
        assert await checkout.diff() == b""
        await sandbox.exec(command, timeout=120)
        second = await checkout.diff()
        await sandbox.close()
    return 1 + (first == second)


async def main(instance: str, command: str, how_many: int) -> None:
    async with AsyncClient() as client:
        episodes = await asyncio.gather(
            *(roll_out(client, instance, command) for _ in range(how_many))
        )
    print(f"{sum(episodes)} episodes of {how_many} rollouts")


asyncio.run(main(sys.argv[1], sys.argv[2], int([*sys.argv[3:], "64"][0])))
