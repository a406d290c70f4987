"""What can happen to one thing in a mirror: an object, a file of objects, a ref, HEAD, the configuration. Chosen by chance.

Files are replaced and never written into: the mirror under the knife shares them with its pristine copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gitrepos import git
from heal_parts import write

from .damaged_mirror import DamagedMirror

Injure = Callable[[DamagedMirror, random.Random], None]


class Injury(NamedTuple):
    """`weight` is how often it is chosen; `shape` of the mirror that it is done to."""

    name: str
    injure: Injure
    shape: str = "packed"
    weight: int = 1


# -- loose objects ----------------------------------------------------------------------------------------------------


def _loose(damaged: DamagedMirror, chance: random.Random) -> Path:
    oid = chance.choice(sorted(damaged.truth.links))
    return damaged.mirror / "objects" / oid[:2] / oid[2:]


def _swap(damaged: DamagedMirror, chance: random.Random) -> None:
    path = _loose(damaged, chance)
    other = path
    while other == path:
        other = _loose(damaged, chance)
    write(path, other.read_bytes())


# -- files ------------------------------------------------------------------------------------------------------------


def _one(damaged: DamagedMirror, chance: random.Random, pattern: str) -> Path:
    return chance.choice(sorted(damaged.mirror.glob(pattern)))


def _truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    write(path, content[: chance.randrange(len(content))])


def _flip_bit(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    write(path, bytes(data))


def _scribble(path: Path, chance: random.Random) -> None:
    """A block of the disk that came back as something else."""
    data = bytearray(path.read_bytes())
    at, size = chance.randrange(len(data)), chance.randrange(1, 512)
    data[at : at + size] = chance.randbytes(len(data[at : at + size]))
    write(path, bytes(data))


def _at(pattern: str, how: Callable[[Path, random.Random], object]) -> Injure:
    def injure(damaged: DamagedMirror, chance: random.Random) -> None:
        how(_one(damaged, chance, pattern), chance)

    return injure


def _lose_pack(damaged: DamagedMirror, chance: random.Random) -> None:
    pack = _one(damaged, chance, "objects/pack/*.pack")
    for file in pack.parent.glob(f"{pack.stem}.*"):
        file.unlink()


def _lose_from_pack(damaged: DamagedMirror, chance: random.Random) -> None:
    """The pack written again without one of its objects."""
    pack = _one(damaged, chance, "objects/pack/*.pack")
    listed = git(
        damaged.mirror, "show-index", stdin=pack.with_suffix(".idx").read_bytes()
    ).splitlines()
    oids = [line.split()[1] for line in listed]
    oids.remove(chance.choice(sorted(oids)))
    git(
        damaged.mirror,
        "pack-objects",
        "-q",
        "objects/pack/pack",
        stdin="".join(f"{oid}\n" for oid in oids).encode(),
    )
    for file in [*pack.parent.glob(f"{pack.stem}.*"), *pack.parent.glob("multi-pack-index*")]:
        file.unlink()


# -- names ------------------------------------------------------------------------------------------------------------


def _ref(damaged: DamagedMirror, chance: random.Random, prefix: str = "refs/") -> str:
    return chance.choice(sorted(ref for ref in damaged.truth.refs if ref.startswith(prefix)))


def _delete(prefix: str) -> Injure:
    def injure(damaged: DamagedMirror, chance: random.Random) -> None:
        ref = _ref(damaged, chance, prefix)
        lines = (damaged.mirror / "packed-refs").read_bytes().splitlines(keepends=True)
        write(
            damaged.mirror / "packed-refs",
            b"".join(line for line in lines if f" {ref}\n".encode() not in line),
        )
        (damaged.mirror / ref).unlink(missing_ok=True)

    return injure


def _overwrite_ref(content: Callable[[random.Random], bytes]) -> Injure:
    return lambda damaged, chance: write(damaged.mirror / _ref(damaged, chance), content(chance))


def _garble_line(damaged: DamagedMirror, chance: random.Random) -> None:
    path = damaged.mirror / "packed-refs"
    lines = path.read_bytes().splitlines(keepends=True)
    number = chance.randrange(1, len(lines))
    lines[number] = chance.choice(
        (b"what is this\n", lines[number][1:], lines[number][:20] + b"\n", b"\0" * 60 + b"\n")
    )
    write(path, b"".join(lines))


def _plant_replace(damaged: DamagedMirror, chance: random.Random) -> None:
    some = sorted(damaged.truth.recorded.values())
    victim, other = chance.sample(some, 2)
    git(damaged.mirror, "replace", victim, other)
    if chance.random() < 0.5:
        git(damaged.mirror, "pack-refs", "--all")


def _spoil_config(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.pop(chance.randrange(1, len(lines)))
    write(path, b"".join(lines))


_PACK, _IDX, _REV = "objects/pack/*.pack", "objects/pack/*.idx", "objects/pack/*.rev"
_MIDX, _GRAPH, _CHAIN = (
    "objects/pack/multi-pack-index",
    "objects/info/commit-graphs/*.graph",
    "objects/info/commit-graphs/*-chain",
)

INJURIES: tuple[Injury, ...] = (
    Injury("loose object missing", lambda p, c: _loose(p, c).unlink(), "loose", 8),
    Injury("loose object truncated", lambda p, c: _truncate(_loose(p, c), c), "loose", 5),
    Injury("loose object empty", lambda p, c: write(_loose(p, c), b""), "loose", 4),
    Injury("loose object, a bit flipped", lambda p, c: _flip_bit(_loose(p, c), c), "loose", 5),
    Injury(
        "loose object overwritten",
        lambda p, c: write(_loose(p, c), c.randbytes(c.randrange(1, 300))),
        "loose",
        3,
    ),
    Injury("loose object has another's bytes", _swap, "loose", 5),
    Injury("object lost out of a pack", _lose_from_pack, weight=10),
    Injury("pack, a bit flipped", _at(_PACK, _flip_bit), weight=8),
    Injury("pack, a block overwritten", _at(_PACK, _scribble), weight=6),
    Injury("pack truncated", _at(_PACK, _truncate), weight=4),
    Injury("pack empty", _at(_PACK, lambda path, _: write(path, b"")), weight=2),
    Injury("pack missing", _at(_PACK, lambda path, _: path.unlink()), weight=2),
    Injury("pack and index missing", _lose_pack, weight=2),
    Injury("index, a bit flipped", _at(_IDX, _flip_bit), weight=4),
    Injury("index truncated", _at(_IDX, _truncate), weight=2),
    Injury("index missing", _at(_IDX, lambda path, _: path.unlink()), weight=2),
    Injury("reverse index, a bit flipped", _at(_REV, _flip_bit)),
    Injury("reverse index truncated", _at(_REV, _truncate)),
    Injury("multi-pack index, a bit flipped", _at(_MIDX, _flip_bit), weight=2),
    Injury("multi-pack index truncated", _at(_MIDX, _truncate)),
    Injury("commit-graph, a bit flipped", _at(_GRAPH, _flip_bit), weight=2),
    Injury("commit-graph truncated", _at(_GRAPH, _truncate)),
    Injury("commit-graph chain truncated", _at(_CHAIN, _truncate)),
    Injury(
        "branch or tag lost",
        lambda p, c: _delete(c.choice(("refs/heads/", "refs/tags/")))(p, c),
        weight=3,
    ),
    Injury("pin of a dataset lost", _delete("refs/mirrord/pins/dataset"), weight=2),
    Injury("pin of a person lost", _delete("refs/mirrord/pins/person"), weight=2),
    Injury("kept ref lost", _delete("refs/mirrord/kept/"), weight=3),
    Injury("ref history's name lost", _delete("refs/mirrord/history")),
    Injury("ref empty", _overwrite_ref(lambda _: b""), weight=3),
    Injury("ref garbled", _overwrite_ref(lambda chance: chance.randbytes(41)), weight=2),
    Injury("packed-refs lost", lambda p, _: (p.mirror / "packed-refs").unlink()),
    Injury("packed-refs truncated", lambda p, c: _truncate(p.mirror / "packed-refs", c), weight=2),
    Injury("packed-refs, a line garbled", _garble_line, weight=2),
    Injury("HEAD lost", lambda p, _: (p.mirror / "HEAD").unlink()),
    Injury("HEAD empty", lambda p, _: write(p.mirror / "HEAD", b"")),
    Injury("HEAD garbled", lambda p, c: write(p.mirror / "HEAD", c.randbytes(20))),
    Injury("configuration lost", lambda p, _: (p.mirror / "config").unlink()),
    Injury("configuration truncated", lambda p, c: _truncate(p.mirror / "config", c)),
    Injury("configuration lacks a line", lambda p, c: _spoil_config(p.mirror / "config", c)),
    Injury("replace ref planted", _plant_replace),
    Injury(
        "alternates planted",
        lambda p, _: write(p.mirror / "objects/info/alternates", b"/nonexistent/objects\n"),
    ),
)


def some_injury(chance: random.Random) -> Injury:
    return chance.choices(INJURIES, [injury.weight for injury in INJURIES])[0]
