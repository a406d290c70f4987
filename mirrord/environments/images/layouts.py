"""Files of OCI layouts: written for one layer, read with every digest checked. For threads."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidImageError
from ...host.files import open_plain, read_plain
from ...jsontext import loads
from ...model import shown
from ...places import TESTBED, read_workdir

_LAYERS_LIMIT = 127  # as docker's; the mount service accepts 160
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_JSON_LIMIT_BYTES = 4 << 20  # of a manifest: as registries have it
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
# images name machines as Go does
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class ImageLayer(NamedTuple):
    """A layer of an image: of `blob`, compressed or not, with the content `diff_id`."""

    blob: str
    media_type: str
    size: int
    diff_id: str

    @property
    def name(self) -> str:
        return self.diff_id.removeprefix("sha256:")


def wrap_archive(archive: Path, place: Path) -> None:
    """Make an OCI layout of one layer, an archive, which is moved into it."""
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)
    size = archive.stat().st_size
    os.link(archive, blobs / digest)
    # uncompressed, so the digest of the blob is that of the content too (diff_id)
    layer = ImageLayer(f"sha256:{digest}", _LAYER, size, f"sha256:{digest}")
    _write_layout(place, place, layer, "image")


def make_single(place: Path, single: Path, layer: ImageLayer) -> None:
    """Make a layout with an image of one layer, whose blob is that of another layout."""
    with suppress(FileExistsError):
        (single / "blobs/sha256").mkdir(parents=True)
    name = layer.blob.removeprefix("sha256:")
    with suppress(FileExistsError):
        os.link(place / "blobs/sha256" / name, single / "blobs/sha256" / name)
    _write_layout(single, single, layer, "layer")


def _write_layout(place: Path, blobs: Path, layer: ImageLayer, tag: str) -> None:
    def put(value: dict[str, Any], media_type: str) -> dict[str, Any]:
        text = json.dumps(value).encode()
        digest = hashlib.sha256(text).hexdigest()
        (blobs / "blobs/sha256" / digest).write_bytes(text)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(text)}

    machine = platform.machine()
    rootfs = {"type": "layers", "diff_ids": [layer.diff_id]}
    config = {"architecture": _MACHINES.get(machine, machine), "os": "linux", "config": {}}
    named = put({**config, "rootfs": rootfs, "history": [{"created_by": "mirrord"}]}, _CONFIG)
    held = {"mediaType": layer.media_type, "digest": layer.blob, "size": layer.size}
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": named, "layers": [held]}
    entry = put(manifest, _MANIFEST) | {"annotations": {"org.opencontainers.image.ref.name": tag}}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')


def read_image(place: Path) -> tuple[dict[str, Any], list[ImageLayer]]:
    """Return the configuration and the layers of the image in a layout, the lowest first."""
    try:
        index = loads(read_plain(place / "index.json"))
        config_of, held = _read_manifest(place, index["manifests"][-1])
        config = _read_blob(place, config_of)
        diff_ids = config["rootfs"]["diff_ids"]
        layers = [
            ImageLayer(_digest(descriptor["digest"]), _type_of(place, descriptor),
                   int(descriptor["size"]), _digest(diff_id))
            for descriptor, diff_id in zip(held, diff_ids, strict=True)
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InvalidImageError(f"cannot read the image: {error}") from error
    machine = _MACHINES.get(platform.machine(), platform.machine())
    if config.get("architecture", machine) != machine:
        fact = f"it is for {shown(str(config['architecture']))}, and this host is {machine}"
        raise InvalidImageError(f"cannot use the image: {fact}")
    if len(layers) > _LAYERS_LIMIT:
        fact = f"it has {len(layers)} layers, and at most {_LAYERS_LIMIT} are shown"
        raise InvalidImageError(f"cannot use the image: {fact}")
    return config, layers


def _read_manifest(place: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    manifest = _read_blob(place, entry)
    return manifest["config"], manifest["layers"]


def _read_blob(place: Path, entry: dict[str, Any]) -> Any:
    """Read a JSON blob and verify its digest."""
    name = _digest(entry["digest"]).removeprefix("sha256:")
    path = place / "blobs/sha256" / name
    if path.lstat().st_size > _JSON_LIMIT_BYTES:
        raise ValueError(f"blob {name[:12]} has more than {_JSON_LIMIT_BYTES} bytes")
    text = read_plain(path)
    if hashlib.sha256(text).hexdigest() != name:
        raise ValueError(f"blob {name[:12]} has another content than its digest says")
    return loads(text)


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{shown(text)} is no sha256")
    return text


def _type_of(place: Path, descriptor: dict[str, Any]) -> str:
    """Return a layer's type as umoci knows it, by its content: skopeo 1.9 says that the plain
    layers of docker archives are compressed.
    """
    name = _digest(descriptor["digest"]).removeprefix("sha256:")
    with open_plain(place / "blobs/sha256" / name) as file:
        magic = file.read(4)
    if magic == b"\x28\xb5\x2f\xfd":
        raise ValueError("a layer is compressed by zstd, which umoci does not unpack")
    return f"{_LAYER}+gzip" if magic.startswith(b"\x1f\x8b") else _LAYER


def variables_of(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for line in config.get("Env") or []:
        name, is_set, value = str(line).partition("=")
        if name and is_set and "\0" not in line:
            yield name, value


def words_of(config: dict[str, Any], name: str) -> list[str]:
    return [str(word) for word in config.get(name) or []]


def find_tree(workdir: str, repositories: Sequence[str]) -> str:
    """Choose where the tree is shown: at the repository in the working directory, or the only one
    outside of others, else at the working directory.
    """
    if workdir in repositories:
        return workdir
    tops = [path for path in repositories if path.count("/") <= 3 and path != "/"]
    tops = [path for path in tops if not any(path.startswith(f"{top}/") for top in tops)]
    likely = [path for path in tops if path == TESTBED] or (tops if len(tops) == 1 else [])
    for path in (*likely, workdir):
        with suppress(ValueError):
            return read_workdir(path)
    return TESTBED
