"""Volumes of pods, each a checkout. Keeps no state that a crash could lose.

The label of a checkout names its volume, and the mount table tells where it is attached. So calls
may be repeated at any time, by a new plugin or after a crash of the daemon. A lease is renewed
while its checkout is attached below the kubelet's directory; without a mount it expires.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ... import Client, model, protocol
from ...client import mounts
from ...errors import (
    CheckoutBusyError,
    CheckoutNotFoundError,
    ConflictError,
    InvalidRequestError,
    MirrordError,
)

LABEL = "csi/"
ATTRIBUTES = (
    *("instance", "repo", "commit", "dataset", "history", "environment"),
    *("owner", "what"),
)

log = logging.getLogger("mirrord.kubernetes")


class PublishedOtherwiseError(ConflictError):
    """The volume is published at this path with other attributes."""


class PublishedElsewhereError(ConflictError):
    """The volume is published at another path."""


class VolumeAttributes(NamedTuple):
    """A pod's request: arguments of `Client.checkout`, and the part that it sees."""

    choice: dict[str, Any]
    what: model.Target


_KUBELET_PREFIX = "csi.storage.k8s.io/"  # of attributes that the kubelet adds
_WHAT = (model.Target.TREE, model.Target.DIRECTORY)
_HISTORIES = (model.History.SEALED, model.History.SQUASHED)
# 2³²-1 is `(uid_t) -1`, which means no change to chown(2)
_OWNER_MAX = 2**32 - 2


def read_attributes(context: Mapping[str, str]) -> VolumeAttributes:
    """Parse the context of a volume; raises InvalidRequestError."""
    given = {key: value for key, value in context.items() if not key.startswith(_KUBELET_PREFIX)}
    if context.get(f"{_KUBELET_PREFIX}ephemeral") != "true":
        raise _refused(
            "it is not an ephemeral inline volume",
            "use the driver in `volumes: - csi:` of a pod; there are no persistent volumes",
        )
    if unknown := sorted(given.keys() - set(ATTRIBUTES)):
        raise _refused(f"unknown attribute {unknown[0]}", f"attributes are {', '.join(ATTRIBUTES)}")
    if ("instance" in given) == ("repo" in given) or ("repo" in given) != ("commit" in given):
        raise _refused("it names no commit", "give instance, or repo with commit")
    history, owner = given.get("history"), given.get("owner")
    if history is not None and history not in _HISTORIES:
        raise _refused(f"unknown history {history}", f"history is {' or '.join(_HISTORIES)}")
    if owner is not None and not (re.fullmatch("[0-9]{1,10}", owner) and int(owner) <= _OWNER_MAX):
        raise _refused(f"invalid owner {owner}", "owner is the uid of the container")
    what = given.pop("what", _WHAT[bool(given.get("environment"))])
    if what not in _WHAT:
        raise _refused(f"unknown what {what}", f"what is {' or '.join(_WHAT)}")
    choice: dict[str, Any] = {**given, "mirror": given.get("repo"), "owner": owner and int(owner)}
    choice.pop("repo", None)
    return VolumeAttributes(choice, model.Target(what))


_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=@-]{0,127}")  # allowed by CSI and in labels


@dataclass(eq=False, repr=False)
class PodVolumes:
    """The volumes of a node. `kubelet` is the kubelet's directory; any thread may call."""

    client: Client
    kubelet: Path
    ttl: timedelta

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def publish(
        self, volume: str, target: str, attributes: VolumeAttributes, *, read_only: bool
    ) -> None:
        """Attach the volume's checkout to the path, which is created; lease one if it has none.

        Raises PublishedOtherwiseError, PublishedElsewhereError, CheckoutBusyError during another
        call for this volume, and errors of the daemon.
        """
        with self._alone(volume):
            place = self._place(target)
            held = next(iter(self._held(volume)), None)
            if held and _is_published(held.id, place, attributes.what, read_only):
                return
            checkout = held or self._lease(volume, attributes)
            try:
                with suppress(FileExistsError):
                    # as the kubelet makes the directories above
                    place.mkdir(mode=0o750)
                self.client.attach_checkout(
                    checkout.id, place, target=attributes.what, read_only=read_only
                )
            except BaseException:
                if held is None:  # the kubelet may not unpublish after a failure
                    with suppress(MirrordError):
                        self._release(volume)
                    with suppress(MirrordError, OSError):
                        _clear(place)
                raise
        log.info("published volume %s: checkout %s at %s", volume, checkout.id, place)

    def unpublish(self, volume: str, target: str) -> None:
        """Undo `publish`: unmount, remove the path, release; may be repeated."""
        with self._alone(volume):
            _clear(self._place(target))
            self._release(volume)
        log.info("unpublished volume %s", volume)

    def renew(self) -> bool:
        """Renew the leases of attached checkouts; returns False after a failure."""
        attached = {
            mount.checkout
            for place, mount in mounts.find_attached().items()
            if place.is_relative_to(self.kubelet.resolve())
        }
        all_renewed = True
        for held in self.client.list_checkouts():
            if held.id in attached and (held.label or "").startswith(LABEL):
                try:
                    self.client.renew_checkout(held.id, self.ttl)
                except CheckoutNotFoundError:
                    continue  # it was released meanwhile
                except MirrordError as error:
                    all_renewed = False
                    log.warning("%s of volume %s", error, held.label)
        return all_renewed

    @contextmanager
    def _alone(self, volume: str) -> Iterator[None]:
        if not _VOLUME.fullmatch(volume):
            hint = "an id has 1 to 128 letters, digits and . _ : = @ -"
            raise InvalidRequestError("cannot use the volume: invalid id", hint=hint)
        with self._lock:
            if volume in self._busy:
                fact = f"cannot use volume {volume}: another call is using it"
                raise CheckoutBusyError(fact, hint="retry after its end")
            self._busy.add(volume)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(volume)

    def _place(self, target: str) -> Path:
        """Return the path to publish at, below the kubelet's directory and without links."""
        below = os.path.relpath(target, self.kubelet) if target.startswith("/") else ".."
        place = self.kubelet.resolve() / below
        is_plain = os.path.normpath(target) == target and ".." not in below.split("/")
        if not is_plain or below == "." or place.parent.resolve() != place.parent:
            hint = f"give an absolute path below {self.kubelet}, without .. and symbolic links"
            raise InvalidRequestError(f"cannot use target path {model.shown(target)}", hint=hint)
        return place

    def _held(self, volume: str) -> list[protocol.Checkout]:
        """Return the checkouts of a volume, without forks and grades, which share the label."""
        labelled = self.client.list_checkouts(f"{LABEL}{volume}")
        return [lease for lease in labelled if lease.parent is None]

    def _lease(self, volume: str, attributes: VolumeAttributes) -> protocol.Checkout:
        options: dict[str, Any] = {**attributes.choice, "ttl": self.ttl, "attach": True}
        return self.client.checkout(**options, label=f"{LABEL}{volume}", auto_renew=False).lease

    def _release(self, volume: str) -> None:
        for held in self._held(volume):
            with suppress(CheckoutNotFoundError):
                self.client.release_checkout(held.id)


def _is_published(checkout: str, place: Path, what: model.Target, read_only: bool) -> bool:
    attached = mounts.find_attached()
    for other, mount in attached.items():
        if mount.checkout == checkout and other != place:
            fact = f"cannot publish the volume at {place}: it is published at {other}"
            raise PublishedElsewhereError(fact, hint="unpublish it there first")
    current = attached.get(place)
    if current is None or current.checkout != checkout:
        return False
    if current != (checkout, what, read_only):
        fact = f"cannot publish the volume at {place}: it is published with other attributes"
        raise PublishedOtherwiseError(fact, hint="unpublish it first")
    return True


def _clear(place: Path) -> None:
    mounts.detach(place)
    with suppress(FileNotFoundError):
        place.rmdir()


def _refused(fact: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(f"cannot publish the volume: {fact}", hint=hint)
