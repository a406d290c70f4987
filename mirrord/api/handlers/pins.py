"""Pins, for administrators: a list of them can tell which commit is the answer, and a pin fetches any commit from upstream."""

from __future__ import annotations

from ...errors import CommitNotFoundError, CommitUnservableError, PinNotFoundError
from ...model import CommitId, MirrorName, parse_commit
from ...protocol import AddPin, Pin
from ..call import Call
from ..queries import PinsQuery, UnpinQuery


async def list_pins(call: Call) -> list[Pin]:
    query: PinsQuery = call.query
    name = (await call.engine.mirrors.get(query.mirror)).name if query.mirror else None
    return await call.engine.mirrors.list_pins(name)


async def add_pin(call: Call) -> Pin:
    body: AddPin = call.body
    commit = parse_commit(body.commit)
    mirrors = call.engine.mirrors
    name = (await mirrors.get(body.mirror)).name
    missing = await mirrors.ensure_commits(name, [commit])
    if missing:
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: {missing[commit]}",
            hint="check the id, or sync the mirror",
            mirror=str(name),
            commit=commit,
        )
    named = (await mirrors.resolve(name, commit)).commit
    if named != commit:
        raise CommitNotFoundError(
            f"cannot pin {commit} of {name}: it is a tag, not a commit", hint=f"pin {named}"
        )
    if refused := await mirrors.pin(name, [commit], owner=_own(call), reason=body.reason):
        raise CommitUnservableError(
            f"cannot pin {commit} of {name}: {refused[commit]}",
            hint=f"sync or audit {name}",
            mirror=str(name),
            commit=commit,
        )
    return await _get_pin(call, name, commit, _own(call))


async def remove_pin(call: Call) -> None:
    query: UnpinQuery = call.query
    owner = query.owner or _own(call)
    commit = parse_commit(call.path["commit"])
    name = (await call.engine.mirrors.get(call.path["name"])).name
    await _get_pin(call, name, commit, owner)
    await call.engine.mirrors.unpin(name, [commit], owner=owner)


async def _get_pin(call: Call, name: MirrorName, commit: CommitId, owner: str) -> Pin:
    for pin in await call.engine.mirrors.list_pins(name):
        if pin.commit == commit and pin.owner == owner:
            return pin
    raise PinNotFoundError(
        f"cannot find a pin of {owner} on {commit} in {name}: there is none",
        hint=f"see `mirrord pins {name}`",
    )


def _own(call: Call) -> str:
    return f"person/{call.peer.uid}"
