"""Peers of a socket: identity and role."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from anyone import BARE_PYTHON, NOBODY
from structlog.testing import capture_logs
from waiting import BOUND_S

from mirrord.config import AccessSettings, Settings
from mirrord.host.peers import Access, Peer, Role, peer_of

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


def settings(**access: object) -> Settings:
    return Settings(access=AccessSettings.model_validate(access))


@pytest.mark.root
def test_the_kernel_identifies_a_peer(tmp_path: Path) -> None:
    """Uid, gid, pid and supplementary groups at the time of connect(2)."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        for directory in (path, *path.parents):
            if directory.owner() == "root" and directory != Path("/"):
                directory.chmod(
                    directory.stat().st_mode | 0o777
                    if directory == path
                    else directory.stat().st_mode | 0o711
                )
        child = subprocess.Popen(
            [BARE_PYTHON, "-c", CONNECT, str(path)],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[1234, 5678],
        )
        connection, _ = listener.accept()
        with connection:
            assert peer_of(connection) == Peer(
                uid=NOBODY, gid=NOBODY, pid=child.pid, groups=(1234, 5678)
            )
            connection.send(b"x")
        assert child.wait(BOUND_S) == 0


def test_root_and_the_daemons_user_are_administrators() -> None:
    """They can read everything anyway."""
    access = Access(settings, own_uid=42)
    assert access.role(Peer(0, 0, 1)) is Role.ADMIN
    assert access.role(Peer(42, 42, 1)) is Role.ADMIN


def test_an_unknown_name_is_logged_once() -> None:
    """At a start, and after a reload that adds it; not at each look-up."""
    named: dict[str, object] = {"group": "no-such-group"}
    with capture_logs() as logged:
        access = Access(lambda: settings(**named), own_uid=42)
        access.refresh()
        named["admins"] = ["no-such-user"]
        access.refresh()
    assert [(entry["event"], entry["log_level"], entry["detail"]) for entry in logged] == [
        (
            "access.warned",
            "warning",
            "the group no-such-group does not exist: only administrators are admitted",
        ),
        ("access.warned", "warning", "the administrator no-such-user does not exist"),
    ]


def test_administrators_are_named_by_name_or_uid() -> None:
    access = Access(lambda: settings(admins=["nobody", 1234]), own_uid=42)
    assert access.role(Peer(NOBODY, NOBODY, 1)) is Role.ADMIN
    assert access.role(Peer(1234, 1234, 1)) is Role.ADMIN
    assert access.role(Peer(1235, 1235, 1)) is Role.STRANGER


@pytest.mark.parametrize(
    ("gid", "groups", "role"),
    [(1, (), Role.MEMBER), (7, (1, 2), Role.MEMBER), (7, (2,), Role.STRANGER)],
)
def test_members_have_the_group_as_primary_or_supplementary(
    gid: int, groups: tuple[int, ...], role: Role
) -> None:
    """Group 1 is daemon on every Debian."""
    access = Access(lambda: settings(group="daemon"), own_uid=42)
    assert access.role(Peer(1000, gid, 1, groups)) is role


def test_a_missing_group_admits_no_member_and_is_logged() -> None:
    access = Access(lambda: settings(group="no-such-group", admins=["no-such-user"]), own_uid=42)
    assert access.role(Peer(1000, 0, 1, (0,))) is Role.STRANGER
    assert any("no-such-group" in text for text in access.warnings)
    assert any("no-such-user" in text for text in access.warnings)


def test_a_digit_that_is_no_number_is_an_unknown_name() -> None:
    """`"²".isdigit()` is true, and `int("²")` an error."""
    access = Access(lambda: settings(group="²", admins=["²"]), own_uid=42)
    assert len(access.warnings) == 2


def test_a_refresh_applies_new_settings() -> None:
    current = settings()
    access = Access(lambda: current, own_uid=os.geteuid())
    assert access.role(Peer(1234, 1234, 1)) is Role.STRANGER
    current = settings(admins=[1234])
    access.refresh()
    assert access.role(Peer(1234, 1234, 1)) is Role.ADMIN


def test_subordinate_uids_count_as_their_user(tmp_path: Path) -> None:
    """A user with 65,536 of them is one user; a range of root or of an unknown name is a user of its own."""
    file = tmp_path / "subuid"
    file.write_text(
        "nobody:100000:65536\n1234:200000:10\nroot:300000:10\nno-such-user:400000:10\n:x:\n1234:5\n"
    )
    access = Access(Settings, subuid=file)
    uids = (99_999, 100_000, 165_535, 165_536, 200_009, 300_005, 400_001, 65534, 0)
    assert [access.user_of(uid) for uid in uids] == [
        99_999,
        65534,
        65534,
        165_536,
        1234,
        300_000,
        400_001,
        65534,
        0,
    ]
