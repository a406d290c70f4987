"""The verbs of checkouts, such as `mirrord checkout`, `reset`, `diff` and `release`."""

import base64
import os
import re
import stat
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ...errors import CheckoutNotFoundError, InstanceNotFoundError, UsageError
from ...model import ApplyStrategy, DiffFormat, FoundStrategy, ObjectSource, Target, View, shown
from ...presence import lexists
from ...protocol import Checkout, RestoreAnswer
from ...quoting import quote_name, unquote_name
from ...units import when
from ..output import count, listing
from ..session import (
    Argument,
    BackendOption,
    HistoryOption,
    InstanceArgument,
    Option,
    OwnerOption,
    Session,
    Ttl,
    ViewOption,
    read_duration,
    read_file,
    read_owner,
    read_pid,
)

ID_HELP = "A checkout: its id, its path, or a path inside it, such as '.'."
Id = Annotated[str, Argument(ID_HELP, "ID", "checkout")]
_DATASET_HELP = "Dataset of the instance, where several record its id differently."
Layer = Annotated[str | None, Option("Prepared layer of the commit to start with.", "NAME")]
_ENVIRONMENT_HELP = "Environment: KEY, KEY@DIGEST, or auto for that of the instance."
Environment = Annotated[str | None, Option(_ENVIRONMENT_HELP, "KEY", names="environment")]
Dataset = Annotated[str | None, Option(_DATASET_HELP, "NAME", names="dataset")]
_ATTACH_HELP = "Make it for `mirrord exec` and `attach`: its path need not be visible here."
Attachable = Annotated[bool, Option(_ATTACH_HELP, flags="--attach")]
_LABEL_HELP = "A word to list and release the checkout by [MIRRORD_LABEL]."
Label = Annotated[str | None, Option(_LABEL_HELP, "LABEL")]
_PATCH_HELP = (
    "A file, - for standard input, or in the grader view @patch or @test_patch, those of the"
    " instance."
)
PatchArgument = Annotated[str, Argument(_PATCH_HELP, "PATCH", "file")]
# base 32 (RFC 4648), in small letters
_CHECKOUT_ID = re.compile(r"[a-z2-7]{16}")
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")


def checkout(
    session: Session,
    instance: InstanceArgument,
    dataset: Dataset = None,
    history: HistoryOption = None,
    view: ViewOption = View.AGENT,
    backend: BackendOption = None,
    objects: Annotated[
        ObjectSource | None,
        Option("Whether the .git of a pool tree borrows its objects; default: as configured."),
    ] = None,
    ttl: Ttl = None,
    owner: OwnerOption = None,
    attachable: Attachable = False,
    layer: Layer = None,
    environment: Environment = None,
    label: Label = None,
) -> None:
    """Release it when you are done; the daemon releases it at its deadline.

    Administrators may name any --owner, members their subordinate uids of /etc/subuid.
    """
    asked: dict[str, Any] = {"dataset": dataset, "history": history, "view": view}
    asked |= {"backend": backend, "layer": layer, "environment": environment, "label": label}
    asked["objects"] = objects
    asked |= {"ttl": read_duration(ttl, "--ttl"), "owner": read_owner(owner)}
    handle = session.client.checkout(instance, **asked, attach=attachable, auto_renew=False)
    print_path(session, handle.lease)


def print_path(session: Session, lease: Checkout) -> None:
    """Answer with a new checkout; say so where its path is closed, being a mount elsewhere."""
    session.answer(lease, [lease.path])
    with suppress(OSError):
        # so the overlay backend makes mount points that may be covered elsewhere alone
        if stat.S_IMODE(os.stat(lease.path).st_mode) == 0:
            fact = "it is mounted in the daemon's own namespace, and its path is closed outside"
            session.note(f"{fact}: use `mirrord exec {lease.id}`, or `mirrord enter`")


_INSTEAD_HELP = "Another instance or commit of the same mirror."


def reset(
    session: Session,
    checkout_id: Id,
    target: Annotated[
        str | None,
        Argument(_INSTEAD_HELP, "[INSTANCE|COMMITISH]", "instance"),
    ] = None,
    dataset: Dataset = None,
    to: Annotated[str | None, Option("Snapshot to go back to.", "NAME")] = None,
    layer: Layer = None,
    environment: Environment = None,
) -> None:
    """Prints the path, once tree and .git are proven equal to the template.

    Unsaved changes are lost, in the environment too; save them with `mirrord diff` first. Layer
    and environment stay unless others are named; a layer belongs to its commit.
    """
    identity = find_id(session, checkout_id)
    move = partial(session.client.reset_checkout, identity, layer=layer, environment=environment)
    if to is not None:
        answer = move(target, dataset=dataset, to=to)
    elif target is None or dataset is not None:
        answer = move(target, dataset=dataset)
    elif _COMMIT.fullmatch(target):
        answer = move(commit=target)
    else:
        try:
            # only the daemon can tell an instance from a branch or a tag
            answer = move(target)
        except InstanceNotFoundError:
            answer = move(commit=target)
    session.answer(answer, [answer.path])


def fork(
    session: Session,
    checkout_id: Id,
    source: Annotated[
        str | None, Option("Snapshot to copy; default: the current state.", "NAME", flags="--from")
    ] = None,
    ttl: Ttl = None,
) -> None:
    """The fork has the same owner, history, view and backend, and all changes of the checkout.

    Of .git it has commits, branches and the index, but neither configuration nor hooks.
    """
    handle = session.client.fork_checkout(
        find_id(session, checkout_id),
        snapshot=source,
        ttl=read_duration(ttl, "--ttl"),
        auto_renew=False,
    )
    print_path(session, handle.lease)


SnapshotName = Annotated[str, Argument("Name of a snapshot.", "NAME")]


def create_snapshot(
    session: Session,
    checkout_id: Id,
    name: Annotated[str | None, Argument("Letters, digits, '.', '_' and '-'.", "[NAME]")] = None,
) -> None:
    """Prints the name, by default s1, s2 and so on. `mirrord reset ID --to NAME` goes back to the
    snapshot, `mirrord fork ID --from NAME` copies it. It is removed with its checkout.
    """
    made = session.client.make_snapshot(find_id(session, checkout_id), name)
    session.answer(made, [made.name])


def list_snapshots(session: Session, checkout_id: Id) -> None:
    """Oldest first."""
    made = session.client.list_snapshots(find_id(session, checkout_id))
    columns = "NAME COMMIT=commit:short TAKEN=copied.taken_at FILES=copied.files"
    session.answer(made, listing(made, columns))


def remove_snapshot(session: Session, checkout_id: Id, name: SnapshotName) -> None:
    """The checkout keeps its content."""
    session.client.remove_snapshot(find_id(session, checkout_id), name)
    session.answer(None, [])


def save_layer(
    session: Session,
    checkout_id: Id,
    name: Annotated[str, Argument("Letters, digits, '.', '_' and '-'.", "NAME")],
) -> None:
    """The layer has the changes of the tree, ignored files included, and of the environment, but
    nothing of .git. `mirrord checkout --layer NAME` starts with it; reset and diff are relative to
    it. Layers of administrators are for all users. A layer never changes.
    """
    made = session.client.save_layer(find_id(session, checkout_id), name)
    session.answer(made, [made.name])


def list_layers(
    session: Session,
    mirror: Annotated[
        str | None, Argument("Only layers of this mirror.", "[NAME]", "mirror")
    ] = None,
) -> None:
    """Users see the layers that they may use, administrators all; oldest first."""
    made = session.client.list_layers(mirror)
    columns = "ID NAME MIRROR COMMIT=commit:short HISTORY ENVIRONMENT UID=saved_by"
    session.answer(made, listing(made, f"{columns} FILES=copied.files CHECKOUTS"))


def remove_layers(
    session: Session,
    layer_ids: Annotated[list[str], Argument("As in `mirrord layer list`.", "ID...", "layer")],
) -> None:
    """A layer that a checkout uses is kept, with status 5."""
    session.each(layer_ids, session.client.remove_layer)
    session.answer(None, [])


def diff(
    session: Session,
    checkout_id: Id,
    stat: Annotated[
        bool, Option("Print the number of changed lines of each file, as git does.")
    ] = False,
    name_status: Annotated[bool, Option("Print how each path changed, as git does.")] = False,
) -> None:
    """The patch includes untracked files that .gitignore does not name. git accepts it.

    With --json the patch is a string, in base64 if it is not UTF-8.
    """
    if stat and name_status:
        raise UsageError("cannot print both --stat and --name-status", hint="give one of them")
    form = DiffFormat.STAT if stat else DiffFormat.NAME_STATUS if name_status else DiffFormat.PATCH
    notes: list[str] = []
    content = session.client.diff_checkout(
        find_id(session, checkout_id), format=form, note=notes.append
    )
    for sentence in notes:
        session.note(f"mirrord: {sentence}")
    if not session.json:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    name = form.replace("-", "_")
    try:
        answer: dict[str, Any] = {name: content.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        answer = {name: base64.b64encode(content).decode(), "encoding": "base64"}
    session.print_json(answer | ({"notes": notes} if notes else {}))


def apply(
    session: Session,
    checkout_id: Id,
    patch: PatchArgument,
    reverse: Annotated[bool, Option("Apply it in reverse.", flags="--reverse -R")] = False,
    strategy: Annotated[
        ApplyStrategy | None,
        Option("As git applies, or as SWE-bench's grader; default: exact, tolerant for @names."),
    ] = None,
) -> None:
    """The whole patch is applied, or nothing.

    With `--strategy tolerant` a patch may have wrong counts, text around it, other line ends or
    context that differs; stderr says how it applied.
    """
    identity = find_id(session, checkout_id)
    if patch.startswith("@") and patch not in {"@patch", "@test_patch"}:
        fact = f"an instance has @patch and @test_patch, not {patch}"
        raise UsageError(f"cannot apply the patch: {fact}", hint=f"a file is ./{patch}")
    content = patch if patch.startswith("@") else read_file(patch)
    answer = session.client.apply_patch(identity, content, reverse=reverse, strategy=strategy)
    if answer.strategy is not FoundStrategy.EXACT:
        session.note(f"applied by strategy {answer.strategy}")
    for sentence in answer.notes:
        session.note(sentence)
    session.answer(answer, [answer.path])


def restore(
    session: Session,
    checkout_id: Id,
    paths: Annotated[list[str], Argument("From the top of the commit's tree.", "PATH...")],
    commit: Annotated[
        str, Option("Pinned commit, or a role of the instance's commits, such as gold.", "SHA")
    ],
) -> None:
    """Needs a checkout in the grader view. Prints the paths.

    Paths may be in git's quotes, as other verbs print those that are not plain text.
    """
    wanted = map(unquote_name, paths)
    written = session.client.restore_paths(find_id(session, checkout_id), commit, *wanted)
    session.answer(RestoreAnswer(paths=written), map(quote_name, written))


def attach(
    session: Session,
    checkout_id: Id,
    path: Annotated[Path, Argument("A directory to attach the tree to.")],
    environment: Annotated[
        Path | None, Option("A directory to attach its environment to.", "PATH")
    ] = None,
    pid: Annotated[
        str | None,
        Option("A process, such as a container's, to attach it in the mount namespace of.", "PID"),
    ] = None,
) -> None:
    """Prints the path. The tree there follows every reset, and is gone with the namespace.

    Needs CAP_SYS_ADMIN in this mount namespace, as after `unshare --user --map-root-user --mount`.
    With --pid, for root only, PATH is as that process sees it.
    """
    identity, process = find_id(session, checkout_id), read_pid(pid)
    client = session.client
    if environment is not None:
        client.attach_checkout(identity, environment, target=Target.ENVIRONMENT, pid=process)
    client.attach_checkout(identity, path, pid=process)
    session.answer(
        {"path": str(path), "environment": environment and str(environment)}, [str(path)]
    )


def release(
    session: Session,
    checkout_ids: Annotated[
        list[str] | None, Argument("Ids or paths of checkouts.", "[ID]...", "checkout")
    ] = None,
    label: Annotated[str | None, Option("Release all checkouts with this label.", "LABEL")] = None,
    every: Annotated[bool, Option("Release all checkouts that you own.", flags="--all")] = False,
) -> None:
    """Unsaved changes are lost; save them with `mirrord diff` first."""
    if (label is not None) + bool(checkout_ids) + every != 1:
        hint = "give ids or paths, or --label, or --all"
        raise UsageError("cannot tell which checkouts to release", hint=hint)
    client, ids = session.client, checkout_ids or []
    others = 0
    if not ids:
        own = os.getuid()
        held = client.list_checkouts(label)
        ids = [lease.id for lease in held if label is not None or lease.owner_uid == own]
        others = len(held) - len(ids)
    session.each(ids, lambda text: client.release_checkout(find_id(session, text)))
    session.answer(None, [])
    if every:
        rest = f"; those of other users stay: {others:,}" if others else ""
        session.note(f"released {count(len(ids), 'checkout')}{rest}")


def renew(session: Session, checkout_id: Id, ttl: Ttl = None) -> None:
    """Prints the new deadline."""
    answer = session.client.renew_checkout(
        find_id(session, checkout_id), read_duration(ttl, "--ttl")
    )
    session.answer(answer, [when(answer.expires_at)])


def list_all(
    session: Session,
    label: Annotated[str | None, Option("Only checkouts with this label.", "LABEL")] = None,
) -> None:
    """Users see their own checkouts, administrators all."""
    held = session.client.list_checkouts(label)
    columns = "ID INSTANCE EXPIRES=expires_at UID=owner_uid COMMIT=commit:short MIRROR"
    session.answer(held, listing(held, f"{columns} HISTORY VIEW BACKEND PATH"))


def is_id(text: str) -> bool:
    """Return whether the text names a checkout rather than an instance."""
    return bool(_CHECKOUT_ID.fullmatch(text)) or text.startswith((".", "/"))


def find_id(session: Session, text: str) -> str:
    """Return the id of a checkout, given by its id, its path, or a path inside it.

    Raises CheckoutNotFoundError if no held checkout has the path, UsageError for an empty text.
    """
    if _CHECKOUT_ID.fullmatch(text):
        return text
    if not text:  # an unset variable of a script; as a path it would be the current directory
        raise UsageError("cannot find a checkout: its name is empty", hint="give an id or a path")
    path = Path(os.path.realpath(text))  # Path.resolve raises for a loop of links
    # another directory's name may look like an id
    for part in filter(_CHECKOUT_ID.fullmatch, path.parts):
        try:
            if path.is_relative_to(Path(session.client.get_checkout(part).path).resolve()):
                return part
        except CheckoutNotFoundError:
            continue
    message = f"cannot find the checkout of {shown(str(path))}: no held checkout has this path"
    with suppress(OSError):
        if "/" not in text and not lexists(path):
            message = f"cannot find checkout {shown(text)}: it is neither an id nor a path"
    raise CheckoutNotFoundError(message, hint="see `mirrord checkouts`")
