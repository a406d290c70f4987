"""What the `.git` of a template holds, for proofs: read once from its layers, which never change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CHECKSUM_BYTES = 20


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """`index` is the checksum at the end of the index; `packs` and `refs` are names."""

    index: str
    control_files: int
    packs: tuple[str, ...]
    refs: tuple[str, ...]


def look_at(layers: tuple[Path, ...]) -> TemplateFacts:
    """Look through the stack, top first; the layers with a `.git` are the index layer and the sealed store."""
    stores = [layer / ".git" for layer in layers if (layer / ".git").is_dir()]
    files = {
        path.relative_to(store): path
        for store in reversed(stores)
        for path in store.rglob("*")
        if path.is_file()
    }
    index = files[Path("index")].read_bytes()[-_CHECKSUM_BYTES:].hex()
    packs = sorted(path.name for path in files if path.suffix == ".pack")
    return TemplateFacts(index, len(files), tuple(packs), tuple(_refs(files)))


def _refs(files: dict[Path, Path]) -> list[str]:
    lines = (
        files[Path("packed-refs")]
        .read_text(encoding="utf-8", errors="surrogateescape")
        .splitlines()
    )
    return sorted(line.partition(" ")[2] for line in lines if line and line[0] not in "#^")
