"""Generations of a mirror in the store: its refs after one sync, and the packs that they need.

A manifest and its packs never change. The catalog says which generation is the newest. A pack holds
what one or more generations added, independent of the mirror's own packs. It records the generation
up to which it and the packs before it are complete, so that a follower takes only what it lacks.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..catalog import Generation
from ..errors import MirrordError, StoreDamagedError
from ..host.files import read_plain
from ..jsontext import dumps, loads
from ..mirrors.refs import directories_of, is_safe_ref, write_durably
from ..mirrors.repository import Refs, Repository
from ..model import MirrorName, shown
from ..quoting import quote_name, unquote_name
from ..telemetry import mask_url
from .objects import Blob, ObjectStore

_FORMAT = 1
# a manifest is not trusted; ours have at most one first pack and a tail of 16
_MAX_PACKS = 1000
_HASH = re.compile(r"[0-9a-f]{64}")
_OID = re.compile(r"[0-9a-f]{40}")
_KEY = re.compile(r"generations/(\d{10,})-(\d{10,})-([0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True)
class PublishedPack:
    """A pack in the store. With those before it, it is complete up to generation `upto`."""

    pack: Blob
    index: Blob
    upto: int


@dataclass(frozen=True, slots=True)
class GenerationManifest:
    """All refs of a mirror at one generation, HEAD, and the packs of everything they reach."""

    mirror: str
    url: str
    epoch: int
    number: int
    head: str | None
    refs: Refs
    packs: tuple[PublishedPack, ...]

    def encode(self) -> bytes:
        """Return the same bytes for the same generation."""
        refs = {quote_name(ref): oid for ref, oid in self.refs.items()}
        value = {
            "format": _FORMAT,
            "mirror": self.mirror,
            "url": mask_url(self.url),
            "epoch": self.epoch,
            "number": self.number,
            "head": None if self.head is None else quote_name(self.head),
            "refs": refs,
            "packs": [[*pack.pack, *pack.index, pack.upto] for pack in self.packs],
        }
        return dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> "GenerationManifest":
        """Read an untrusted manifest; raises ValueError, KeyError, TypeError."""
        value: Any = loads(content)
        if value["format"] != _FORMAT:
            raise ValueError(f"its format is {value['format']!r}, and this mirrord knows {_FORMAT}")
        head, refs, packs = value["head"], _read_refs(value["refs"]), value["packs"]
        if not isinstance(packs, list) or len(packs) > _MAX_PACKS:
            raise ValueError("it has no packs, or too many")
        head = None if head is None else unquote_name(_text(head))
        if head is not None and head not in refs:
            raise ValueError("its HEAD names no ref")
        return cls(
            mirror=str(MirrorName.parse(value["mirror"])),
            url=_text(value["url"]),
            epoch=_count(value["epoch"]),
            number=_count(value["number"]),
            head=head,
            refs=refs,
            packs=tuple(_pack(*pack) for pack in packs),
        )


def _read_refs(named: Any) -> Refs:
    """Read the refs, whose names are in their printable form, and in no other."""
    if not isinstance(named, dict):
        raise TypeError("its refs are no object")
    refs = {unquote_name(name): oid for name, oid in named.items()}
    if len(refs) < len(named):
        raise ValueError("a ref is named twice")
    for ref, oid in refs.items():
        # a replace ref changes what a recorded commit checks out to
        if not is_safe_ref(ref) or ref.startswith("refs/replace/"):
            raise ValueError(f"the name of a ref is not allowed: {shown(ref, 100)}")
        if (
            not isinstance(oid, str)
            or not _OID.fullmatch(oid)
            or not refs.keys().isdisjoint(directories_of(ref))
        ):
            fact = "names no object, or is the directory of another"
            raise ValueError(f"ref {shown(ref, 100)} {fact}")
    return refs


def _pack(pack: Any, size: Any, index: Any, index_size: Any, upto: Any) -> PublishedPack:
    hashes = (_text(pack), _text(index))
    if not all(map(_HASH.fullmatch, hashes)):
        raise ValueError("the name of a pack is no SHA-256")
    return PublishedPack(
        Blob(hashes[0], _count(size)), Blob(hashes[1], _count(index_size)), _count(upto)
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _count(value: Any) -> int:
    # bool is an int; epochs and numbers have to fit a BIGINT and grow in it
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("not a count")
    return value


def prefix_of(name: MirrorName) -> str:
    return f"mirrors/{name.key}/"


def pack_key(name: MirrorName, pack: PublishedPack) -> str:
    return f"{prefix_of(name)}packs/{pack.pack.sha256}.pack"


def index_key(name: MirrorName, pack: PublishedPack) -> str:
    return f"{prefix_of(name)}packs/{pack.pack.sha256}-{pack.index.sha256}.idx"


def manifest_key(name: MirrorName, generation: Generation) -> str:
    epoch, number, digest = generation
    return f"{prefix_of(name)}generations/{epoch:010d}-{number:010d}-{digest}.json"


def list_published(store: ObjectStore, name: MirrorName) -> list[Generation]:
    """List every manifest in the store, the oldest first; also those that no catalog took."""
    prefix = prefix_of(name)
    keys = (entry.key.removeprefix(prefix) for entry in store.iterate(f"{prefix}generations/"))
    matches = filter(None, map(_KEY.fullmatch, keys))
    return sorted(Generation(int(it[1]), int(it[2]), it[3]) for it in matches)


def put_manifest(store: ObjectStore, name: MirrorName, manifest: GenerationManifest) -> Generation:
    content = manifest.encode()
    digest = hashlib.sha256(content).hexdigest()
    generation = Generation(manifest.epoch, manifest.number, digest)
    store.put(manifest_key(name, generation), content)
    return generation


_MAX_MANIFEST_BYTES = 256 * 1024**2  # about two million refs


def read_manifest(
    store: ObjectStore, name: MirrorName, generation: Generation, *, tries: int = 3
) -> GenerationManifest:
    """Read a manifest; raises StoreDamagedError where it is gone or has other bytes."""
    key, fact = manifest_key(name, generation), "it is gone"
    # as a download: a cache before the store may be at fault
    for _ in range(tries):
        content = store.get(key, limit_bytes=_MAX_MANIFEST_BYTES)
        if content is None:
            continue
        if hashlib.sha256(content).hexdigest() != generation.manifest:
            fact = "checksum mismatch"
            continue
        try:
            manifest = GenerationManifest.decode(content)
        except (ValueError, KeyError, TypeError, MirrordError) as error:
            fact = f"it is no manifest: {error}"
            break
        if (manifest.epoch, manifest.number) == generation[:2] and name.key == (
            MirrorName.parse(manifest.mirror).key
        ):
            return manifest
        fact = "it is of another generation"
        break
    raise StoreDamagedError(f"cannot use {key} of the store: {fact}")


_FILE = "mirrord-generation"


def read_generation(git_dir: Path) -> Generation | None:
    """Read the generation of a mirror on disk; None for one that never followed the store."""
    try:
        epoch, number, digest = read_plain(git_dir / _FILE).decode("ascii").split()
        return Generation(int(epoch), int(number), digest)
    except (FileNotFoundError, ValueError):  # a power cut may have emptied it
        return None


def write_generation(repository: Repository, generation: Generation) -> None:
    content = " ".join(map(str, generation)).encode() + b"\n"
    write_durably(repository.path / _FILE, content)


def is_before(one: Generation | None, other: Generation) -> bool:
    return one is None or one[:2] < other[:2]
