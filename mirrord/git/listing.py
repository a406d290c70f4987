"""The refs of an upstream, asked for by prefix: a forge has a million that nobody follows.

`git ls-remote` (2.39) asks for all refs, whatever its patterns. `git fetch` sends a prefix for each
refspec (protocol v2), and GIT_TRACE_PACKET shows the answer.
"""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from .. import errors
from ..quoting import decode_name
from .command import Git
from .configuration import Remote

_MAX_LIST_BYTES = 64 * 1024**2  # about a million refs
_NONE = "refs/mirrord/none"
_ENDS = f"fatal: couldn't find remote ref {_NONE}"


class RefList(NamedTuple):
    """What `git ls-remote --symref` prints, and stderr."""

    lines: Sequence[str]
    stderr: str


async def list_refs(
    git: Git,
    git_dir: Path,
    remote: Remote,
    patterns: Sequence[str],
    *,
    timeout: timedelta,
    doing: str,
) -> RefList:
    """List HEAD and at least the refs that `patterns` match; `git_dir` is not changed.

    An upstream without protocol v2 sends all its refs.
    """
    packets = _Packets(doing)
    prefixes = sorted({pattern.partition("*")[0] for pattern in patterns})
    answer = await git.run(
        # ls-remote asks for every ref, because its patterns match the end of a name; fetch asks for
        # the prefixes of refspecs. The first one names no ref, at which fetch ends after the list.
        "fetch", "--dry-run", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance",
        "--refmap=", "--", remote.url, f"{_NONE}:{_NONE}", f"HEAD:{_NONE}",
        *(f"+{prefix}*:refs/mirrord/{number}/*" for number, prefix in enumerate(prefixes)),
        git_dir=git_dir,
        env={"GIT_TRACE_PACKET": "1"},
        remote=remote,
        timeout=timeout,
        memory_bytes=4 * _MAX_LIST_BYTES,
        packets=packets.take,
        ends_with=_ENDS,
        doing=doing,
    )  # fmt: skip
    if packets.is_complete:
        return RefList(packets.lines, answer.stderr)
    everything = await git.run(
        "ls-remote", "--symref", "--", remote.url,
        remote=remote,
        timeout=timeout,
        memory_bytes=4 * _MAX_LIST_BYTES,
        stdout_limit_bytes=_MAX_LIST_BYTES,
        doing=doing,
    )  # fmt: skip
    return RefList(everything.lines, everything.stderr)


_ANSWER = re.compile(r"fetch< (.*)")
_REF = re.compile(r"([0-9a-f]{40}) (\S+)((?: \S+)*)")


class _Packets:
    """Reads the trace of one exchange: capabilities to a flush, refs to a flush."""

    def __init__(self, doing: str) -> None:
        self.lines: list[str] = []
        self._doing = doing
        self._size_bytes = 0
        self._is_v2 = False
        self._flushes = 0

    @property
    def is_complete(self) -> bool:
        return self._is_v2 and self._flushes == 2

    def take(self, packet: str) -> None:
        if not (answer := _ANSWER.fullmatch(packet)):
            return
        text = answer[1]
        self._size_bytes += len(text)  # of an old upstream too, which may never end
        if self._size_bytes > _MAX_LIST_BYTES:
            fact = f"its output is larger than {_MAX_LIST_BYTES} bytes"
            raise errors.UpstreamError(f"cannot {self._doing}: {fact}")
        if text == "object-format=sha256":
            raise errors.UpstreamError(
                f"cannot {self._doing}: upstream has SHA-256 object ids, and a mirror has SHA-1",
                hint="mirror a copy with SHA-1 object ids",
            )
        if text == "version 2":
            self._is_v2 = True
        elif text == "0000":
            self._flushes += 1
        elif self._is_v2 and self._flushes == 1 and (ref := _REF.fullmatch(text)):
            self._take_ref(*ref.groups())

    def _take_ref(self, oid: str, raw: str, attributes: str) -> None:
        name = _unescaped(raw)
        for attribute in attributes.split():
            if name == "HEAD" and attribute.startswith("symref-target:"):
                self.lines.append(f"ref: {_unescaped(attribute.partition(':')[2])}\tHEAD")
        self.lines.append(f"{oid}\t{name}")


# a byte above 127 is printed in octal; where `char` is signed, as a number of 32 bits
_OCTAL = re.compile(r"\\(37777777[67][0-7]{2}|[23][0-7]{2})")


def _unescaped(text: str) -> str:
    """Return a name of the trace as `decode_name` gives it."""
    if "\\" not in text:
        return text
    raw = _OCTAL.sub(lambda match: chr(int(match[1], 8) & 0xFF), text)
    return decode_name(raw.encode("latin-1", "replace"))
