"""What a client sends of a local image: an archive, or a directory as one."""

import os
from collections.abc import Iterator
from pathlib import Path

from .. import errors
from . import http

_ARCHIVES = ("docker-archive", "oci-archive")
_DIRECTORIES = {"oci": "oci-archive", "dir": "rootfs"}
_KINDS = ("docker", *_ARCHIVES, *_DIRECTORIES)
# the kernel's, and what a container gets anew
_LEFT_OUT = ("./proc/*", "./sys/*", "./dev/*", "./run/*", "./tmp/*")


def is_image(source: str) -> bool:
    """Return whether a source names an image, by its kind."""
    return source.partition(":")[0] in _KINDS and ":" in source


def open_image(source: str) -> tuple[str, Iterator[bytes] | None]:
    """Return what the daemon calls a source, and the archive to send; None if the daemon fetches
    it. Raises UsageError, and OSError for a file that cannot be read.
    """
    kind, _, name = source.partition(":")
    if not is_image(source) or not name or (kind == "docker" and not name.startswith("//")):
        hint = "for example docker://debian:12, oci-archive:FILE or dir:ROOTFS"
        raise errors.UsageError(f"cannot import {source}: it names no image", hint=hint)
    if kind == "docker":
        return source, None
    path, _, reference = name.partition(":")
    sent = f"{_DIRECTORIES.get(kind, kind)}:{os.path.basename(path.rstrip('/')) or 'image'}"
    sent += f":{reference}" if reference else ""
    if kind in _ARCHIVES:
        os.stat(path)
        return sent, http.iter_file(Path(path))
    with os.scandir(path):  # raises here what tar would
        pass
    left_out = [f"--exclude={pattern}" for pattern in _LEFT_OUT] if kind == "dir" else []
    # names of users mean other uids where it is unpacked
    options = ["--create", "--one-file-system", "--numeric-owner", *left_out]
    return sent, _pack(["tar", *options, "--directory", path, "."], source)


def _pack(argv: list[str], source: str) -> Iterator[bytes]:
    import subprocess  # noqa: PLC0415  (half of what other verbs would load)

    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as packing:
        assert packing.stdout
        assert packing.stderr
        try:
            while piece := packing.stdout.read(1 << 16):
                yield piece
            text = packing.stderr.read().decode(errors="replace").strip()
        except BaseException:
            packing.kill()
            raise
    if packing.returncode:
        last = text.splitlines()[-1:] or [f"tar ended with {packing.returncode}"]
        raise errors.UsageError(f"cannot read {source}: {last[0]}")
