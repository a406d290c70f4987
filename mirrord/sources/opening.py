"""From the words of a command line to rows: one file, several, task folders, `hf://`, or `-`.

One plain row file is sent to the daemon as it is. Everything else becomes a stream of JSON lines
that say where each row is from; it holds one row, or one batch of Arrow. The daemon sees no path.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

from ..datasets.readers import Origin, RawRow, iter_rows, row_line
from ..errors import ResourceError, UsageError
from . import tables

_LABEL_LENGTH = 255
_PIECE_BYTES = 256 * 1024
_HINT = "name a file of rows, a folder of tasks, hf://owner/name, or - for standard input"


class Source(NamedTuple):
    """Rows that were opened. `label` is what the catalog calls them; `file` is one plain row file.

    `name` is the dataset's default name, None where the file's or the user's is taken.
    """

    label: str
    name: str | None
    file: Path | None
    rows: Callable[[], Iterator[RawRow]]

    def pieces(self) -> Iterator[bytes]:
        """The rows as JSON lines, in pieces of some 256 KiB."""
        lines, size = [], 0
        for row in self.rows():
            line = row_line(row, self.label)
            lines.append(line)
            size += len(line)
            if size >= _PIECE_BYTES:
                yield b"".join(lines)
                lines, size = [], 0
        if lines:
            yield b"".join(lines)


def open_sources(words: Sequence[str]) -> Source:
    """The rows of one source, or of several in their order. Downloads what is on the Hub.

    Raises UsageError, InvalidDatasetError, UpstreamError, ResourceError.
    """
    opened = [_open(word) for word in words]
    if len(opened) == 1:
        return opened[0]
    labels = ", ".join(source.label for source in opened)
    if len(labels) > _LABEL_LENGTH:
        labels = f"{opened[0].label[:200]} and {len(opened) - 1} more"
    return Source(labels, None, None, lambda: _with_origins(opened))


def _with_origins(sources: Sequence[Source]) -> Iterator[RawRow]:
    """All rows, each with a line of its own in the stream, and the place it is from."""
    line = 0
    for source in sources:
        for row in source.rows():
            line += 1
            yield row._replace(line=line, origin=row.origin or Origin(source.label, row.line))


def _open(word: str) -> Source:
    if word == "-":
        return _standard_input()
    if word.startswith("hf://"):
        hub = import_module(".hub", __package__)  # loads huggingface_hub
        return cast("Source", hub.open_dataset(word))
    path = Path(word)
    if path.is_dir():
        folders = import_module(".folders", __package__)  # loads YAML
        name = path.resolve().name[:_LABEL_LENGTH]
        return Source(name, name, None, partial(folders.iter_tasks, path))
    if not path.is_file():
        raise UsageError(f"cannot import {word}: it is neither a file nor a folder", hint=_HINT)
    if not os.access(path, os.R_OK):
        raise UsageError(f"cannot import {word}: you may not read it", hint=_HINT)
    return open_file(path, path.name)


def open_file(path: Path, label: str) -> Source:
    """One file of rows: plain where the daemon's readers read it, else a table."""
    if table := tables.find_reader(path):
        return Source(label, path.name.split(".")[0], None, partial(table, path, path.name))
    return Source(label, None, path, _plain_rows(path, path.name))


def _plain_rows(path: Path, name: str) -> Callable[[], Iterator[RawRow]]:
    return partial(iter_rows, path, name)


def _standard_input() -> Source:
    """Standard input as a file without a name, because Parquet is read from its end.

    Its descriptor stays open: there is one standard input in a process.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="mirrord-")
        os.unlink(name)
        with open(descriptor, "wb", closefd=False) as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        hint = "TMPDIR names the directory in which it is kept"
        raise ResourceError(f"cannot keep standard input: {error.strerror}", hint=hint) from error
    path = Path(f"/proc/self/fd/{descriptor}")
    return Source("standard input", None, path, _plain_rows(path, "standard input"))
