"""Small images: layers of files of this host, as OCI archives."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROGRAMS = ("bash", "sh", "cat", "git", "id", "ls", "mkdir", "setsid", "touch")
Member = tuple[str, bytes | None, dict[str, Any]]
"""A path, its content or None for a directory, and fields of TarInfo."""


def root(place: Path) -> Path:
    """Make a root file system that can run a few programs of this host."""
    (place / "bin").mkdir(parents=True)
    for name in ("etc", "root", "tmp", "opt"):
        (place / name).mkdir()
    (place / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nme:x:7:8::/opt:/bin/sh\n")
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program
        shutil.copy(os.path.realpath(program), place / "bin" / name)
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        for library in re.findall(r"(/\S+)", needed.stdout):
            to = place / library.removeprefix("/")
            to.parent.mkdir(parents=True, exist_ok=True)
            if not to.exists():
                shutil.copy(library, to)
    return place


def layer(members: Iterable[Member], *, above: Path | None = None) -> bytes:
    """Make an archive of members, and of the directory `above`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        if above:
            archive.add(above, arcname=".")
        for name, content, fields in members:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if content is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(content or b""))
    return packed.getvalue()


def oci(place: Path, layers: Iterable[bytes], config: Mapping[str, Any] | None = None) -> Path:
    """Make an OCI layout with one image, of the tag `image`."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        kind = f"application/vnd.oci.image.{kind}"
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    held = [put(each, "layer.v1.tar") for each in layers]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    written = {"architecture": machine, "os": "linux", "config": config or {}}
    written["rootfs"] = {"type": "layers", "diff_ids": [each["digest"] for each in held]}
    of = put(json.dumps(written).encode(), "config.v1+json")
    manifest = {"schemaVersion": 2, "config": of, "layers": held}
    entry = put(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return place
