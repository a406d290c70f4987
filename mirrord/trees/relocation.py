"""Paths in the text of an environment, which is built for one place and shown at another."""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from ..host.files import write_all

# The files of a prefix in which pip, setuptools, uv and Python itself write where it is, or where
# an editable project is. What Python compiled of them is checked by their hash.
_NAMING = re.compile(
    rb"bin/[^/]+|pyvenv\.cfg|lib(?:64)?/pkgconfig/[^/]+\.pc|share/jupyter/kernels/[^/]+/kernel\.json"
    rb"|lib(?:64)?/python3[^/]*/(?:_sysconfigdata[^/]*\.py|site-packages/"
    rb"(?:[^/]+\.(?:pth|egg-link)|_[^/]*editable[^/]*\.py|[^/]+\.dist-info/direct_url\.json))",
    re.DOTALL,
)
_TEXT_BYTES = 1 << 20  # a longer file is a program


class Relocation:
    """Paths that become others, in the files that name them. What is longer goes first."""

    def __init__(self, places: Mapping[str, Path | str]) -> None:
        self._places = {os.fsencode(origin): os.fsencode(to) for origin, to in places.items()}
        names = b"|".join(map(re.escape, sorted(self._places, key=len, reverse=True)))
        # not within a longer path: `/x/testbed` and `/testbed-2` stay as they are
        self._names = re.compile(rb"(?<![\w.-])(?:%s)(?![\w.-])" % names)

    def text(self, data: bytes) -> bytes:
        """Return a text with the new paths."""
        return self._names.sub(lambda match: self._places[match[0]], data)

    def file(self, path: bytes, file: int) -> int:
        """Return an open file of a prefix, or instead one in memory with the new paths."""
        st = os.fstat(file)
        if not _NAMING.fullmatch(path) or st.st_size > _TEXT_BYTES:
            return file
        data = os.pread(file, st.st_size, 0)
        # a NUL: a program, in which a path of another length would move what follows
        if b"\0" in data or (text := self.text(data)) == data:
            return file
        made = os.memfd_create("mirrord")
        os.fchmod(made, stat.S_IMODE(st.st_mode))
        write_all(made, text)
        os.lseek(made, 0, os.SEEK_SET)
        os.close(file)
        return made
