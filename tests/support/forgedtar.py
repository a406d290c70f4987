"""Tar archives as no tar writes them."""

from __future__ import annotations

import tarfile

END = bytes(1024)


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **more: object) -> bytes:
    """A member as GNU tar writes it; `more` are attributes of its header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for attribute, value in more.items():
        setattr(info, attribute, value)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def sparse() -> bytes:
    """1,536 bytes that say they are a file of 2 GiB."""
    header = bytearray(tarfile.TarInfo("d/large").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[257:265] = b"ustar  \0"
    header[483:495] = b"%011o " % (2 << 30)
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def negative() -> bytes:
    header = bytearray(member("a"))
    header[124:136] = b"\xff" * 12
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


ROOT = member(".", tarfile.DIRTYPE)
