"""Where the bytes of a new tree come from: git's objects, or the layers of its template.

A template's files were proven when it was built. Copying them saves inflating the objects, which
is two thirds of the processor time of writing a tree.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import ProofFailedError
from ..git.objects.repository import Objects
from ..git.objects.text import Conversions
from ..git.objects.trees import TreeEntry, must_be_target
from ..host.files import open_directory, open_regular, opened, shown_path
from ..host.processes import ActingAs
from .manifest import NO_OBJECT, Entry, Manifest, blob_id, without
from .reader import TreeReader

# return the record of an entry, and the bytes of its file or link
Read = Callable[[TreeEntry], tuple[Entry, bytes]]


class LayerFiles(NamedTuple):
    """A layer of a template: its files, beside their manifest, and what it hides of those below."""

    files: Path
    removed: Sequence[bytes]


def unrecorded(entry: TreeEntry) -> Entry:
    """Return the record of an entry without the stat of its file."""
    oid = bytes.fromhex(entry.oid)
    content = NO_OBJECT if entry.is_tree or entry.is_submodule else oid
    return Entry(entry.mode, oid, content)


def read_object(
    objects: Objects, conversions: Conversions, entry: TreeEntry
) -> tuple[Entry, bytes]:
    """Return the record of an entry, and the bytes that git has for it, converted."""
    record = unrecorded(entry)
    if entry.is_tree or entry.is_submodule:
        return record, b""
    data = objects.read_blob(entry.oid)
    if entry.is_symlink:
        must_be_target(entry.oid, data)
    elif conversion := conversions.find(entry.path):
        data = conversion.smudge(data, entry.oid)
        record = record._replace(content=blob_id(data))
    return record, data


@contextmanager
def reading_layers(layers: Sequence[LayerFiles]) -> Iterator[tuple[list[TreeEntry], Read]]:
    """Yield the entries below a template's root, directories before their content, and their reads.

    `layers` are given top first. Raises ProofFailedError where a file is not as it was recorded,
    or is gone.
    """
    records: dict[bytes, Entry] = {}
    readers: dict[bytes, TreeReader] = {}
    with ExitStack() as stack:
        for layer in reversed(layers):
            files = _load(layer.files.with_name("manifest")).files.decoded()
            root = stack.enter_context(opened(open_directory(layer.files)))
            reader = stack.enter_context(TreeReader(root, ActingAs(None)))
            records = without(records, layer.removed) | files
            readers |= dict.fromkeys(files, reader)
        entries = [
            TreeEntry(path, records[path].mode, records[path].oid.hex())
            for path in sorted(filter(None, records))
        ]

        def read(entry: TreeEntry) -> tuple[Entry, bytes]:
            record = records[entry.path]
            if record.is_directory:
                return record, b""
            try:
                data = _read_file(*readers[entry.path].locate(entry.path), record)
            except OSError as error:
                raise _damaged(entry.path) from error
            if blob_id(data) != record.content:
                raise _damaged(entry.path)
            return record, data

        yield entries, read


def _load(manifest: Path) -> Manifest:
    try:
        return Manifest.load(manifest)
    except OSError as error:
        raise _damaged(b"") from error


def _read_file(directory: int, name: bytes, record: Entry) -> bytes:
    if stat.S_ISLNK(record.st_mode):
        return os.readlink(name, dir_fd=directory)
    with open(open_regular(directory, name), "rb", buffering=0) as file:
        return file.readall()


def _damaged(path: bytes) -> ProofFailedError:
    return ProofFailedError(
        f"cannot copy {shown_path(path)} of the template: it is not as it was recorded",
        hint="audit the mirror, which discards damaged templates; then check the disk",
    )
