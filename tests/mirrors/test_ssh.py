"""Upstreams over ssh: a real sshd on loopback; keys and hosts that are accepted, refused, changed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House
from ports import free_port
from waiting import until

from mirrord.errors import (
    CredentialUnusableError,
    HostKeyChangedError,
    HostKeyUnknownError,
    MirrordError,
    SshKeyRefusedError,
    SshMissingError,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd logs in as root"),
]


def make_key(path: Path) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def fingerprint(key: Path) -> str:
    command = ["ssh-keygen", "-l", "-f", f"{key}.pub"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[1]


class Sshd:
    """sshd on a free port; it lets `key` in, and `host` is its own key."""

    def __init__(self, root: Path) -> None:
        self.host, self.key = make_key(root / "host"), make_key(root / "key")
        self.other = make_key(root / "other")
        allowed = root / "authorized"
        # only reading, and only git: the test's sshd runs as root
        only = 'restrict,command="git-shell -c \\"$SSH_ORIGINAL_COMMAND\\"" '
        allowed.write_text(only + Path(f"{self.key}.pub").read_text())
        self.port = free_port()
        config = root / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host}\nUsePAM no\n"
            f"AuthorizedKeysFile {allowed}\nStrictModes no\nPidFile none\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.log = (root / "log").open("wb")
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
        self.process = subprocess.Popen(command, stderr=self.log)
        self.url = f"ssh://root@127.0.0.1:{self.port}"
        until(self._listens)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def known(self, path: Path, key: Path) -> Path:
        words = Path(f"{key}.pub").read_text().split()[:2]
        path.write_text(f"[127.0.0.1]:{self.port} {' '.join(words)}\n")
        return path

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


def test_a_login_over_ssh_works_or_says_why_not(
    tmp_path: Path,
    sshd: Sshd,
    make_upstream: Callable[..., Upstream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each cause has an error of its own, which names the host's key and the file to add it to."""
    upstream = make_upstream("owner+name")
    upstream.history(1)
    house = Builder(tmp_path, f"{sshd.url}{upstream.path.parent}/{{owner}}+{{name}}")
    right = sshd.known(tmp_path / "right %d", sshd.host)
    changed = sshd.known(tmp_path / "changed", sshd.other)
    empty, wrong = tmp_path / "empty", tmp_path / "wrong"
    empty.touch()
    wrong.write_text(f"[127.0.0.1]:{sshd.port} ssh-ed25519 nonsense\n")
    new, open_key = tmp_path / "new", tmp_path / "open"
    open_key.write_bytes(sshd.key.read_bytes())
    open_key.chmod(0o644)

    def attempt(known_hosts: Path, key: Path = sshd.key, **more: object) -> MirrordError | None:
        entry: dict[str, Any] = {"ssh_key": str(key), "known_hosts": str(known_hosts)}
        house.values["credential"] = [{"url": sshd.url, **entry, **more}]
        raised: list[MirrordError] = []

        async def body(it: House) -> None:
            if not await it.mirrors.list_mirrors():
                await it.mirrors.add("owner/name")
            try:
                await it.mirrors.sync(NAME)
            except MirrordError as error:
                raised.append(error)

        house.run(body)
        return raised[0] if raised else None

    host = fingerprint(sshd.host)
    for known_hosts, kind in {
        empty: HostKeyUnknownError,
        wrong: HostKeyUnknownError,
        changed: HostKeyChangedError,
    }.items():
        error = attempt(known_hosts)
        assert type(error) is kind
        assert host in error.message
        assert str(known_hosts) in f"{error.message} {error.hint}"
    for key in (sshd.other, open_key):
        error = attempt(right, key)
        assert type(error) is SshKeyRefusedError
        assert str(key) in error.message
    assert type(attempt(right, tmp_path / "absent")) is CredentialUnusableError
    assert attempt(right) is None
    assert attempt(new, accept_new=True) is None
    assert "ssh-ed25519" in new.read_text()  # Debian's ssh hashes the host's name
    assert type(attempt(changed, accept_new=True)) is HostKeyChangedError
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("git", "setpriv", "prlimit", "sh", "ionice", "nice"):
        target = subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True)
        (programs / name).symlink_to(target.stdout.strip())
    monkeypatch.setenv("PATH", str(programs))
    assert type(attempt(right)) is SshMissingError
