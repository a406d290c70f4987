"""The refs of pins: `refs/mirrord/pins/OWNER/COMMIT`.

Apart from `pins.py`, because workers read them and need neither the catalog nor the settings.
"""

import re

from ..errors import InvalidRequestError
from ..model import CommitId, shown
from .repository import PINS, Refs

_OWNER = re.compile(r"dataset/[A-Za-z0-9][A-Za-z0-9._-]{0,99}|person/\d{1,10}")
_PIN = re.compile(rf"({_OWNER.pattern})/[0-9a-f]{{40}}")


def check_owner(owner: str) -> None:
    """Raise InvalidRequestError unless an owner is `dataset/NAME` or `person/UID`."""
    if not _OWNER.fullmatch(owner) or ".." in owner or owner.endswith((".lock", ".")):
        fact = "an owner is dataset/NAME or person/UID"
        raise InvalidRequestError(f"cannot pin for {shown(owner)}: {fact}")


def pin_ref(owner: str, commit_id: str) -> str:
    return f"{PINS}{owner}/{commit_id}"


def is_pin(ref: str) -> bool:
    return ref.startswith(PINS) and bool(_PIN.fullmatch(ref.removeprefix(PINS)))


def read_pins(refs: Refs) -> list[tuple[str, CommitId]]:
    """List the pins among refs, as (owner, commit)."""
    return [
        (ref.removeprefix(PINS).rpartition("/")[0], CommitId(oid))
        for ref, oid in refs.items()
        # one that was moved by hand no longer has the commit that it names
        if is_pin(ref) and ref.endswith(oid)
    ]
