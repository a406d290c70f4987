"""Volumes of pods, each a checkout. Keeps no state, so any crash leaves what the next call needs.

A volume's checkout is found by its label, and where it is attached by the table of mounts. So both
calls may come again at any time, to a new plugin, or after the daemon was killed. A lease is
renewed while its checkout is attached below the kubelet's directory; without a mount it expires.
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
_KUBELETS = "csi.storage.k8s.io/"  # what the kubelet adds begins with this
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=@-]{0,127}")  # what CSI allows and a label takes
_WHAT = (model.Target.TREE, model.Target.DIRECTORY)
_HISTORIES = (model.History.SEALED, model.History.SQUASHED)
_OWNER_MAX = 2**32 - 2

log = logging.getLogger("mirrord.kubernetes")


class PublishedOtherwiseError(ConflictError):
    """The volume is at this path, in another form."""


class PublishedElsewhereError(ConflictError):
    """The volume is at another path."""


class VolumeAttributes(NamedTuple):
    """What a pod asks for: arguments of `Client.checkout`, and what of that it sees."""

    choice: dict[str, Any]
    what: model.Target


def read_attributes(context: Mapping[str, str]) -> VolumeAttributes:
    """Read the context of a volume; raises InvalidRequestError, which says what is allowed."""
    given = {key: value for key, value in context.items() if not key.startswith(_KUBELETS)}
    if context.get(f"{_KUBELETS}ephemeral") != "true":
        raise _refused(
            "it is no ephemeral inline volume",
            "name the driver below `volumes: - csi:` of a pod; there are no persistent volumes",
        )
    if unknown := sorted(given.keys() - set(ATTRIBUTES)):
        raise _refused(f"no attribute {unknown[0]}", f"attributes are {', '.join(ATTRIBUTES)}")
    if ("instance" in given) == ("repo" in given) or ("repo" in given) != ("commit" in given):
        raise _refused("it names no commit", "give instance, or repo with commit")
    history, owner = given.get("history"), given.get("owner")
    if history is not None and history not in _HISTORIES:
        raise _refused(f"no history {history}", f"history is {' or '.join(_HISTORIES)}")
    if owner is not None and not (re.fullmatch("[0-9]{1,10}", owner) and int(owner) <= _OWNER_MAX):
        raise _refused(f"no owner {owner}", "owner is the uid that the container works as")
    what = given.pop("what", _WHAT[bool(given.get("environment"))])
    if what not in _WHAT:
        raise _refused(f"what is not {what}", f"what is {' or '.join(_WHAT)}")
    choice: dict[str, Any] = {**given, "mirror": given.get("repo"), "owner": owner and int(owner)}
    choice.pop("repo", None)
    return VolumeAttributes(choice, model.Target(what))


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
        """Attach the volume's checkout at the path, which is made; take one where there is none.

        Raises PublishedOtherwiseError, PublishedElsewhereError, CheckoutBusyError while another
        call is about this volume, and what the daemon says.
        """
        with self._alone(volume):
            place = self._place(target)
            held = next(iter(self._held(volume)), None)
            if held and _is_published(held.id, place, attributes.what, read_only):
                return
            checkout = held or self._take(volume, attributes)
            try:
                with suppress(FileExistsError):
                    place.mkdir(mode=0o750)
                self.client.attach_checkout(
                    checkout.id, place, target=attributes.what, read_only=read_only
                )
            except BaseException:
                if held is None:  # the kubelet may not ask to undo what failed
                    with suppress(MirrordError):
                        self._release(volume)
                    with suppress(MirrordError, OSError):
                        _clear(place)
                raise
        log.info("published volume %s: checkout %s at %s", volume, checkout.id, place)

    def unpublish(self, volume: str, target: str) -> None:
        """Undo `publish`: unmount, remove the path, release. Fine where nothing is left."""
        with self._alone(volume):
            _clear(self._place(target))
            self._release(volume)
        log.info("unpublished volume %s", volume)

    def renew(self) -> bool:
        """Renew the leases of all that is attached; False where one could not be."""
        attached = {
            each.checkout
            for place, each in mounts.find_attached().items()
            if place.is_relative_to(self.kubelet.resolve())
        }
        is_whole = True
        for held in self.client.list_checkouts():
            if held.id in attached and (held.label or "").startswith(LABEL):
                try:
                    self.client.renew_checkout(held.id, self.ttl)
                except CheckoutNotFoundError:
                    continue  # released meanwhile
                except MirrordError as error:
                    is_whole = False
                    log.warning("%s of volume %s", error, held.label)
        return is_whole

    @contextmanager
    def _alone(self, volume: str) -> Iterator[None]:
        if not _VOLUME.fullmatch(volume):
            hint = "an id has 1 to 128 letters, digits and . _ : = @ -"
            raise InvalidRequestError("cannot use the volume: no id that we take", hint=hint)
        with self._lock:
            if volume in self._busy:
                fact = f"cannot work on volume {volume}: another call is about it"
                raise CheckoutBusyError(fact, hint="wait for it to end, then try again")
            self._busy.add(volume)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(volume)

    def _place(self, target: str) -> Path:
        """The path to publish at, with no link on the way below the kubelet's directory."""
        below = os.path.relpath(target, self.kubelet) if target.startswith("/") else ".."
        place = self.kubelet.resolve() / below
        is_plain = os.path.normpath(target) == target and ".." not in below.split("/")
        if not is_plain or below == "." or place.parent.resolve() != place.parent:
            hint = f"it is an absolute path below {self.kubelet}, without .. and symbolic links"
            raise InvalidRequestError(f"cannot use target path {model.shown(target)}", hint=hint)
        return place

    def _held(self, volume: str) -> list[protocol.Checkout]:
        """The checkouts of a volume; forks and grades of them have the label too."""
        labelled = self.client.list_checkouts(f"{LABEL}{volume}")
        return [each for each in labelled if each.parent is None]

    def _take(self, volume: str, attributes: VolumeAttributes) -> protocol.Checkout:
        how: dict[str, Any] = {"ttl": self.ttl, "label": f"{LABEL}{volume}", "auto_renew": False}
        return self.client.checkout(**attributes.choice, attach=True, **how).lease

    def _release(self, volume: str) -> None:
        for held in self._held(volume):
            with suppress(CheckoutNotFoundError):
                self.client.release_checkout(held.id)


def _is_published(checkout: str, place: Path, what: model.Target, read_only: bool) -> bool:
    attached = mounts.find_attached()
    for other, each in attached.items():
        if each.checkout == checkout and other != place:
            fact = f"cannot publish the volume at {place}: it is at {other}"
            raise PublishedElsewhereError(fact, hint="unpublish it there first")
    here = attached.get(place)
    if here is None or here.checkout != checkout:
        return False
    if here != (checkout, what, read_only):
        fact = f"cannot publish the volume at {place}: it is there, in another form"
        raise PublishedOtherwiseError(fact, hint="unpublish it first")
    return True


def _clear(place: Path) -> None:
    mounts.detach(place)
    with suppress(FileNotFoundError):
        place.rmdir()


def _refused(fact: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(f"cannot publish the volume: {fact}", hint=hint)
