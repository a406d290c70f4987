"""Archives of layers are judged before anything of them is unpacked."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from pathlib import Path

import images
import pytest

from mirrord.environments.images import layers
from mirrord.errors import InvalidImageError

LIMIT = 1 << 20
LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc"}
HARD = {"type": tarfile.LNKTYPE}


def judge(place: Path, archive: bytes, diff_id: str | None = None) -> layers.Listing:
    (place / "blob").write_bytes(gzip.compress(archive))
    diff_id = diff_id or f"sha256:{hashlib.sha256(archive).hexdigest()}"
    return layers.list_layer(place / "blob", diff_id, LIMIT)


@pytest.mark.parametrize(
    ("members", "fact"),
    [
        ([("/etc/x", b"", {})], "which leads out of it"),
        ([("a/../../x", b"", {})], "which leads out of it"),
        ([("x", b"", {**HARD, "linkname": "../../etc/passwd"})], "leads out"),
        ([("x", b"", {**HARD, "linkname": "/etc/passwd"})], "leads out"),
        ([("d", b"", LINK), ("x", b"", {**HARD, "linkname": "d/passwd"})], "below a link"),
        ([("d", b"", LINK), ("d/passwd", b"", {})], "below the link 'd'"),
        ([("d", b"", LINK), ("d/e/f", b"", {})], "below the link 'd'"),
        ([("d", b"", LINK), ("d/.wh.passwd", b"", {})], "below the link 'd'"),
        ([(".", b"", LINK)], "a root of its own"),
        ([("x", b"", {"type": tarfile.CHRTYPE})], "device node"),
        ([("x", b"", {"type": tarfile.BLKTYPE})], "device node"),
        ([("a/.wh...", b"", {})], "which leads out of it"),
        ([("a/.wh.", b"", {})], "of no name"),
        ([(".wh..", b"", {})], "of no name"),
        ([("x", b"", {"pax_headers": {"GNU.sparse.major": "0", "comment": "y" * (2 << 20)}})],
         "a header of"),
        ([("d/" * 500 + "x", b"", {})], "components"),
        ([(f"d{number}", b"", {}) for number in range(6)], "more than 5 files"),
        ([("bomb", bytes(LIMIT + 1), {})], "more bytes unpacked"),
    ],
)  # fmt: skip
def test_a_hostile_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[images.Member], fact: str
) -> None:
    monkeypatch.setattr(layers, "ENVIRONMENT_FILES_LIMIT", 5)
    with pytest.raises(InvalidImageError, match=fact):
        judge(tmp_path, images.layer(members))


def test_what_follows_the_archive_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ENVIRONMENT_FILES_LIMIT", 5)
    with pytest.raises(InvalidImageError, match="more bytes unpacked"):
        judge(tmp_path, images.layer([("x", b"1", {})]) + bytes(LIMIT + (1 << 14)))


def test_the_content_must_be_that_of_the_digest(tmp_path: Path) -> None:
    with pytest.raises(InvalidImageError, match="not that of its digest"):
        judge(tmp_path, images.layer([("x", b"1", {})]), f"sha256:{'0' * 64}")
    (tmp_path / "blob").write_bytes(gzip.compress(images.layer([("x", b"1", {})]))[:-20])
    with pytest.raises(InvalidImageError, match="no archive that can be read"):
        layers.list_layer(tmp_path / "blob", f"sha256:{'0' * 64}", LIMIT)


def test_what_real_layers_have_is_listed(tmp_path: Path) -> None:
    listing = judge(tmp_path, images.layer([
        ("d", None, {}), ("d/", None, {}), ("d/x", b"1", {}), ("d/y", b"", {**HARD, "linkname": "d/x"}),
        ("l", b"", LINK), ("m", b"", {**HARD, "linkname": "l"}), ("e/.wh.z", b"", {}),
        ("f/.wh..wh..opq", b"", {}), ("g/.git", None, {}), ("dev/null", b"", {"type": tarfile.CHRTYPE}),
    ]))  # fmt: skip
    assert (listing.removed, listing.opaque, listing.repositories) == (["e/z"], ["f"], ["/g"])
