"""`mirrord checkout`, `reset`, `diff`, `apply`, `restore`, `release`, `renew` and `checkouts`."""

from __future__ import annotations

import base64
import pwd
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..errors import CheckoutNotFoundError, InstanceNotFoundError, UsageError
from ..model import Backend, History, View, shown
from .durations import Ttl, read_duration
from .output import short, table, when
from .parameters import Argument, Option
from .session import Session, print_line, read_file

if TYPE_CHECKING:
    from .. import Client
    from ..protocol import ResetAnswer

Id = Annotated[
    str,
    Argument(metavar="ID", help="A checkout: its id, its path, or a path inside it such as '.'."),
]
Owner = Annotated[
    str | None,
    Option(
        "--owner",
        metavar="USER",
        help="The user, by name or uid, whose checkout it is; default: you.",
    ),
]
Dataset = Annotated[
    str | None,
    Option(
        metavar="NAME", help="Whose instance, where several datasets record the id differently."
    ),
]
_CHECKOUT_ID = re.compile(r"[a-z2-7]{16}")
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")


def checkout(
    session: Session,
    instance: Annotated[
        str, Argument(metavar="INSTANCE", help="An instance id, or NAME@COMMITISH.")
    ],
    dataset: Dataset = None,
    history: Annotated[
        History | None, Option(help="How much of the past it shows; default: as configured.")
    ] = None,
    view: Annotated[
        View, Option(help="Who it is for: an agent, or the grader of one.")
    ] = View.AGENT,
    backend: Annotated[
        Backend | None, Option(help="How it is made; default: as configured.")
    ] = None,
    ttl: Ttl = None,
    owner: Owner = None,
) -> None:
    """Release it when you are done; the daemon releases it at its deadline.

    With --owner, another user's: administrators may name anybody, members their own uids of /etc/subuid."""
    with session.client() as client:
        handle = client.checkout(
            instance,
            dataset=dataset,
            history=history,
            view=view,
            backend=backend,
            ttl=read_duration(ttl, "--ttl"),
            owner=read_owner(owner),
            auto_renew=False,
        )
    session.answer(handle.lease, lambda: [handle.lease.path])


def reset(
    session: Session,
    checkout_id: Id,
    to: Annotated[
        str | None,
        Argument(metavar="[INSTANCE or COMMITISH]", help="Another one of the same repository."),
    ] = None,
    dataset: Dataset = None,
) -> None:
    """Answers after the tree and the control files of .git were proven equal to the template's; prints the path."""
    with session.client() as client:
        answer = _reset(client, find_id(client, checkout_id), to, dataset)
    session.answer(answer, lambda: [answer.path])


def _reset(client: Client, found: str, to: str | None, dataset: str | None) -> ResetAnswer:
    if dataset is not None:
        return client.reset_checkout(found, to, dataset=dataset)
    if to is None:
        return client.reset_checkout(found)
    if _COMMIT.fullmatch(to):
        return client.reset_checkout(found, commit=to)
    try:
        return client.reset_checkout(found, to)
    except InstanceNotFoundError:
        return client.reset_checkout(found, commit=to)


def diff(session: Session, checkout_id: Id) -> None:
    """Tracked and untracked files that .gitignore does not name; `git apply` accepts it at the base commit."""
    with session.client() as client:
        patch = client.diff_checkout(find_id(client, checkout_id))
    if session.json:
        session.print_json(_as_json(patch))
        return
    sys.stdout.buffer.write(patch)
    sys.stdout.buffer.flush()


def _as_json(patch: bytes) -> dict[str, str]:
    """A patch need not be UTF-8, and no byte of it may be lost."""
    try:
        return {"patch": patch.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"patch": base64.b64encode(patch).decode(), "encoding": "base64"}


def apply(
    session: Session,
    checkout_id: Id,
    patch: Annotated[
        str,
        Argument(
            help="A file, - for standard input, or @test_patch or @patch of the instance (grader view)."
        ),
    ],
    reverse: Annotated[bool, Option("--reverse", "-R", help="Take it out instead.")] = False,
) -> None:
    """All of it or nothing."""
    with session.client() as client:
        found = find_id(client, checkout_id)
        answer = client.apply_patch(
            found, patch if patch.startswith("@") else read_file(patch), reverse=reverse
        )
    session.answer(answer, lambda: [answer.path])


def restore(
    session: Session,
    checkout_id: Id,
    paths: Annotated[
        list[str],
        Argument(metavar="PATH...", help="Files of that commit, from the top of the tree."),
    ],
    commit: Annotated[str, Option(metavar="SHA", help="A pinned commit.")],
) -> None:
    """Needs a checkout of the grader view."""
    with session.client() as client:
        written = client.restore_paths(find_id(client, checkout_id), commit, *paths)
    if session.json:
        session.print_json({"paths": written})
        return
    for path in written:
        print_line(path)


def release(
    session: Session,
    checkout_ids: Annotated[list[str], Argument(metavar="ID...", help="Ids or paths.")],
) -> None:
    """Unsaved changes are lost; save them with `mirrord diff` first."""
    with session.client() as client:
        session.each(checkout_ids, lambda one: client.release_checkout(find_id(client, one)))
    if session.json:
        session.print_json(None)


def renew(session: Session, checkout_id: Id, ttl: Ttl = None) -> None:
    """Prints the new deadline."""
    with session.client() as client:
        answer = client.renew_checkout(find_id(client, checkout_id), read_duration(ttl, "--ttl"))
    session.answer(answer, lambda: [when(answer.expires_at)])


def list_all(session: Session) -> None:
    """Your own; an administrator sees everybody's."""
    with session.client() as client:
        held = client.list_checkouts()
    header = (
        "ID",
        "INSTANCE",
        "MIRROR",
        "COMMIT",
        "HISTORY",
        "VIEW",
        "BACKEND",
        "UID",
        "EXPIRES",
        "PATH",
    )
    rows = [
        (
            c.id,
            c.instance,
            c.mirror,
            short(c.commit),
            c.history,
            c.view,
            c.backend,
            str(c.owner_uid),
            c.expires_at,
            c.path,
        )
        for c in held
    ]
    session.answer(held, lambda: table(header, rows))


def read_owner(text: str | None) -> int | None:
    """The uid of a user."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError as error:
        raise UsageError(
            f"cannot find user {shown(text)}: this host has no such user", hint="give the uid"
        ) from error


def find_id(client: Client, text: str) -> str:
    """The id that `text` is, or that of the checkout whose path it is or lies in. The daemon has the last word on a path."""
    if _CHECKOUT_ID.fullmatch(text):
        return text
    path = Path(text).resolve()
    for part in path.parts:
        if _CHECKOUT_ID.fullmatch(part) and _holds(client, part, path):
            return part
    if not path.exists() and "/" not in text:
        raise CheckoutNotFoundError(
            f"cannot find checkout {shown(text)}: it is neither an id nor a path",
            hint="see `mirrord checkouts`",
        )
    raise CheckoutNotFoundError(
        f"cannot find the checkout of {shown(str(path))}: none that is held has this path",
        hint="see `mirrord checkouts`",
    )


def _holds(client: Client, checkout_id: str, path: Path) -> bool:
    try:
        return path.is_relative_to(Path(client.get_checkout(checkout_id).path).resolve())
    except CheckoutNotFoundError:
        return False
