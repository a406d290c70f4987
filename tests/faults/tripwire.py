"""What a daemon does to its state directory, seen as it happens, so that a fault can strike at a step that has a name.

inotify tells of every name that is made, renamed or removed. A step is such a change with everything random taken out of the
path; the steps of an operation are found by watching it once, so that a step which is added to the product is struck too.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_CREATE, _DELETE, _MOVED_FROM, _MOVED_TO, _MODIFY = 0x100, 0x200, 0x40, 0x80, 0x2  # linux/inotify.h
_IS_DIRECTORY, _DONT_FOLLOW, _ONLY_DIRECTORIES = 0x40000000, 0x2000000, 0x1000000
_MASK = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _DONT_FOLLOW | _ONLY_DIRECTORIES
_VERBS = {
    _CREATE: "made",
    _DELETE: "removed",
    _MOVED_FROM: "renamed away",
    _MOVED_TO: "in place",
    _MODIFY: "written",
}
_HEADER = struct.Struct("iIII")
_OPAQUE = re.compile(r"(checkouts/[^/]+/tree|/files|/(layer|next)/(upper|work)|\.trash-\*)/.*")
_THROWN_AWAY = re.compile(r"(quarantine/[^/]+)/.*")
_RANDOM = (
    (re.compile(r"[0-9a-f]{40}"), "*"),
    (re.compile(r"\b[0-9a-f]{38}\b"), "*"),
    (re.compile(r"/objects/[0-9a-f]{2}(?=/|$)"), "/objects/*"),
    (re.compile(r"(?<=-)[0-9a-f]{16}\b"), "*"),
    (re.compile(r"(?<=[/-])[a-z2-7]{16}(?=[/.]|$)"), "*"),
    (re.compile(r"(tmp_[a-z]+_|\.building-|dataset-|upload-|tmp|idx_|graph_|\.tmp-)\w+"), r"\1*"),
    (re.compile(r"(clone|fetch|bundle|import|heal)-\w+"), r"\1-*"),
    (re.compile(r"\b(refs|packs)_\w{6}\b"), r"\1_*"),
    (re.compile(r"/t\w{6}$"), "/t*"),  # git init (2.39) tries whether there are symbolic links
    (re.compile(r"o__(first)\d+"), r"o__\1*"),
    (re.compile(r"\b(data|branch|tag|topic|bundled)-?\d+"), r"\1*"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def step_name(verb: str, path: str) -> str:
    """A change without what is random in its path; everything inside a working tree, or that is thrown away, is one step."""
    if verb == "removed":
        path = _THROWN_AWAY.sub(r"\1…", path)
    for pattern, replacement in _RANDOM:
        path = pattern.sub(replacement, path)
    return f"`{_OPAQUE.sub(lambda match: match[1] + '…', path)}` {verb}"


class Tripwire:
    """Calls `on_step` in a thread for every step below `root`, with its name and how often it came, from `with` to its end."""

    def __init__(self, root: Path, on_step: Callable[[str, int], None]) -> None:
        self._root = root
        self._on_step = on_step
        self._seen: Counter[str] = Counter()
        self._paths: dict[int, str] = {}
        self._announced: set[str] = set()  # whose event may still come: made after the watch was

    def __enter__(self) -> Tripwire:
        self._fd = _libc.inotify_init1(os.O_CLOEXEC)
        self._end, self._stopper = os.pipe()
        self._watch("", announce=False)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stopper, b"x")
        self._thread.join()
        for fd in (self._fd, self._end, self._stopper):
            os.close(fd)

    def _run(self) -> None:
        while self._end not in select.select([self._fd, self._end], [], [])[0]:
            for watch, mask, name in _iter_events(os.read(self._fd, 1 << 16)):
                self._note(watch, mask, name)

    def _note(self, watch: int, mask: int, name: str) -> None:
        above = self._paths.get(watch)
        if above is None or not name:
            return
        path = f"{above}/{name}" if above else name
        was_announced = path in self._announced
        self._announced.discard(path)
        if was_announced and mask & _CREATE:
            return
        self._tell(_VERBS[mask & 0xFFF], path)
        if mask & _IS_DIRECTORY and mask & (_CREATE | _MOVED_TO):
            self._watch(path, announce=bool(mask & _CREATE))

    def _tell(self, verb: str, path: str) -> None:
        step = step_name(verb, path)
        if "daemon.lock" not in step and "-shm" not in step:
            self._seen[step] += 1
            self._on_step(step, self._seen[step])

    def _watch(self, path: str, *, announce: bool) -> None:
        """Watch a directory and those below; `announce` what was made in it before we came. Never enters a client's tree."""
        if _OPAQUE.match(f"{path}/x") or re.match(r"checkouts/[^/]+/tree", path):
            return
        mask = _MASK | (0 if path else _MODIFY)
        watch = _libc.inotify_add_watch(self._fd, os.fsencode(self._root / path), mask)
        if watch < 0:
            return
        self._paths[watch] = path
        try:
            entries = sorted(os.scandir(self._root / path), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            inner = f"{path}/{entry.name}" if path else entry.name
            if announce:
                self._announced.add(inner)
                self._tell("made", inner)
            if entry.is_dir(follow_symlinks=False):
                self._watch(inner, announce=announce)


def _iter_events(data: bytes) -> Iterator[tuple[int, int, str]]:
    at = 0
    while at < len(data):
        watch, mask, _, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        yield watch, mask, data[at : at + length].rstrip(b"\0").decode(errors="surrogateescape")
        at += length
