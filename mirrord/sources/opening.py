"""Open the arguments of `dataset import`: one file, several, task folders, `hf://`, or `-`.

One plain row file is sent to the daemon as it is. Everything else becomes a stream of JSON lines,
each with its origin; memory holds one row, or one batch of Arrow. The daemon sees no path.
"""

import csv
import io
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..datasets.elements import ELEMENT_LIMIT_BYTES
from ..datasets.parquet import import_pyarrow
from ..datasets.readers import iter_rows, open_unpacked
from ..datasets.rows import Origin, RawRow, row_line
from ..errors import InvalidDatasetError, ResourceError, UsageError
from ..host.zstd import ZstdError
from ..model import shown
from ..presence import is_dir, is_file

# as of a file's name: NAME_MAX
_LABEL_LENGTH = 255
_ROWS = {".json", ".jsonl", ".parquet"}
_TASKS = {"task.toml", "task.yaml"}
# rows sent in one piece of a chunked body
_PIECE_BYTES = 256 * 1024
_HINT = "name a file of rows, a folder of tasks, hf://owner/name, or - for standard input"


class Source(NamedTuple):
    """An opened source. `label` is its name in the catalog; `file` is set for one plain row file.

    `name` is the dataset's default name, or None if the file's name or the user's is taken.
    """

    label: str
    name: str | None
    file: Path | None
    rows: Callable[[], Iterator[RawRow]]

    def pieces(self) -> Iterator[bytes]:
        """Iterate over the rows as JSON lines, in pieces of about 256 KiB."""
        piece = bytearray()
        for row in self.rows():
            piece += row_line(row, self.label)
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        if piece:
            yield bytes(piece)


def open_sources(words: Sequence[str]) -> Source:
    """Open one source, or several as one. Downloads datasets of the Hub.

    Raises UsageError, InvalidDatasetError, UpstreamError, ResourceError.
    """
    opened = [_open(word) for word in words]
    if len(opened) == 1:
        return opened[0]
    labels = ", ".join(source.label for source in opened)
    if len(labels) > _LABEL_LENGTH:
        labels = f"{opened[0].label[:200]} and {len(opened) - 1} more"
    return Source(labels, None, None, partial(with_origins, opened))


def with_origins(sources: Sequence[Source]) -> Iterator[RawRow]:
    """Iterate over all rows, numbered as lines of one stream, each with its origin."""
    line = 0
    for source in sources:
        for row in source.rows():
            line += 1
            yield row._replace(line=line, origin=row.origin or Origin(source.label, row.line))


def _open(word: str) -> Source:
    if word == "-":
        return _standard_input()
    if word.startswith("hf://"):
        from . import hub  # noqa: PLC0415  (loads huggingface_hub)

        return hub.open_dataset(word)
    path = Path(word)
    if is_dir(path) and (files := _row_files(path)):
        name = path.resolve().name[:_LABEL_LENGTH]
        opened = [open_file(file, file.name) for file in files]
        return Source(name, name, None, partial(with_origins, opened))
    if is_dir(path):
        from . import folders  # noqa: PLC0415  (loads YAML)

        name = path.resolve().name[:_LABEL_LENGTH]
        return Source(name, name, None, partial(folders.iter_tasks, path))
    if not is_file(path):
        raise UsageError(f"cannot import {word}: it is neither a file nor a folder", hint=_HINT)
    if not os.access(path, os.R_OK):
        raise UsageError(f"cannot import {word}: permission denied", hint=_HINT)
    return open_file(path, path.name)


def _row_files(directory: Path) -> list[Path]:
    """Return the files of rows in a directory that has no others below it, which may be tasks."""
    entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    if any(is_dir(entry) or entry.name in _TASKS for entry in entries):
        return []
    return [entry for entry in entries if entry.suffix in _ROWS and is_file(entry)]


def open_file(path: Path, label: str) -> Source:
    """Open one file of rows: sent as it is if the daemon reads its format, else as JSON lines."""
    if table := _find_reader(path):
        rows = partial(table, path, path.name)
        if is_dir(issues := path.parent / "issues"):
            rows = partial(_with_issues, issues, rows)
        return Source(label, path.name.split(".")[0], None, rows)
    return Source(label, None, path, partial(iter_rows, path, path.name))


def _standard_input() -> Source:
    """Copy standard input to an unlinked file, because Parquet is read from its end.

    The descriptor stays open until the process ends.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="mirrord-")
        os.unlink(name)
        with open(descriptor, "wb", closefd=False) as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        hint = "set TMPDIR to a directory with room for it"
        raise ResourceError(f"cannot store standard input: {error.strerror}", hint=hint) from error
    path = Path(f"/proc/self/fd/{descriptor}")
    return Source("standard input", None, path, partial(iter_rows, path, "standard input"))


# -- tables: rows of CSV and Arrow files, one batch at a time --------------------------------------

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PACKED = {".gz", ".zst"}
# a stream begins with the continuation marker of its first message
_ARROW_FILE, _ARROW_STREAM = b"ARROW1", b"\xff\xff\xff\xff"  # feather v2 is an Arrow file


def _find_reader(path: Path) -> Callable[[Path, str], Iterator[RawRow]] | None:
    """Find the reader of a file: CSV by its name, Arrow by its first bytes; None for others."""
    if _delimiter(path):
        return iter_csv
    with path.open("rb") as file:
        head = file.read(6)
    return iter_arrow if head.startswith((_ARROW_FILE, _ARROW_STREAM)) else None


def _delimiter(path: Path) -> str | None:
    stem = path.with_suffix("") if path.suffix.lower() in _PACKED else path
    return _DELIMITERS.get(stem.suffix.lower())


def iter_csv(path: Path, source: str) -> Iterator[RawRow]:
    """Read rows of a CSV file with a header line; each value is text."""
    with path.open("rb") as file:
        head = file.read(8)
    # csv's own limit is 128 KiB, and patches are longer
    csv.field_size_limit(ELEMENT_LIMIT_BYTES)
    # spreadsheets begin a file with a byte order mark; csv wants the line ends as they are
    text = io.TextIOWrapper(
        io.BufferedReader(open_unpacked(path, head)), "utf-8-sig", "surrogateescape", newline=""
    )
    with text:
        reader = csv.reader(text, delimiter=_delimiter(path) or ",")
        columns = next(reader, None)
        if not columns:
            raise InvalidDatasetError(
                f"cannot import dataset {shown(source)}: it is empty", hint="nothing was changed"
            )
        line = reader.line_num + 1
        try:
            for values in reader:
                if len(values) == len(columns):
                    yield RawRow(line, dict(zip(columns, values, strict=True)))
                elif values:
                    fault = f"it has {len(values)} values for {len(columns)} columns"
                    yield RawRow(line, fault=fault)
                line = reader.line_num + 1
        except (csv.Error, ZstdError, zlib.error, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk failed; damaged content has no errno
            yield RawRow(line, fault=f"it is not CSV from here on: {error}")


_ISSUE_FILES = ("commit_id", "revert_command")
# a commit id, or a command of the shell
_ISSUE_BYTES = 64 * 1024


def _with_issues(issues: Path, rows: Callable[[], Iterator[RawRow]]) -> Iterator[RawRow]:
    """Add to rows of SWE-Lancer what is in `issues/QUESTION_ID/NAME.txt` beside their table."""
    for row in rows():
        question = (row.value or {}).get("question_id")
        if row.value is not None and isinstance(question, str) and _ISSUE.fullmatch(question):
            for name in _ISSUE_FILES:
                file = issues / question / f"{name}.txt"
                if is_file(file):
                    with file.open("rb") as opened:
                        text = opened.read(_ISSUE_BYTES).decode("utf-8", "replace")
                    row.value[name] = text.strip()
        yield row


_ISSUE = re.compile(r"[\w-]{1,100}")


def iter_arrow(path: Path, source: str) -> Iterator[RawRow]:
    """Read rows of an Arrow file or stream. The `datasets` library caches tables as streams."""
    arrow = import_pyarrow(source)
    line = 0
    try:
        with arrow.memory_map(str(path)) as file:
            for batch in _batches(arrow.ipc, file, path):
                for number in range(batch.num_rows):
                    line += 1
                    yield RawRow(line, batch.slice(number, 1).to_pylist()[0])
    except MemoryError:  # pyarrow's is an ArrowException too
        raise
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        fact = str(error).partition("\n")[0][:200]
        yield RawRow(line + 1, fault=f"the file is damaged from here on: {fact}")


def _batches(ipc: Any, file: Any, path: Path) -> Iterator[Any]:
    with path.open("rb") as opened:
        is_file = opened.read(6) == _ARROW_FILE
    if not is_file:
        yield from ipc.open_stream(file)
        return
    reader = ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
