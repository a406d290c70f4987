"""Secrets of `[[credential]]` are nowhere but where they were written."""

from __future__ import annotations

import json
import tarfile
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from canaries import Canaries
from daemons import daemon
from forge import Forge, serving
from gitrepos import Upstream
from ports import free_port

from mirrord.cli.main import run

pytestmark = pytest.mark.slow


def _arguments() -> bytes:
    """The command lines of all processes."""
    lines = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines += path.read_bytes()
    return lines


def _unpacked(bundle: Path) -> str:
    with tarfile.open(bundle) as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        return "".join(file.read().decode(errors="replace") for file in files if file)


def _configuration(forge: Forge, secrets: Path, listen: str, proxy: str) -> str:
    program = secrets / "program"
    program.write_text(f"#!/bin/sh\ncat {secrets}/second\n")
    program.chmod(0o700)
    return f"""
        [web]
        listen = "{listen}"
        [checkouts]
        backend = "pool"
        [[credential]]
        url = "{forge.url}/"
        username = "me"
        password_file = "{secrets}/first"
        [[credential]]
        url = "{forge.url}/second"
        username = "me"
        command = ["{program}"]
        [[credential]]
        url = "http://git.example.invalid/"
        bearer_file = "{secrets}/third"
        proxy = "http://me:{proxy}@{forge.url.partition("://")[2]}"
        """.replace("        ", "")


def test_secrets_are_shown_and_stored_nowhere(
    tmp_path: Path, make_upstream: Callable[..., Upstream], capsys: pytest.CaptureFixture[str]
) -> None:
    """In files, arguments, logs, answers, events, bundles, the page; not even when they are refused."""
    for name in ("first", "second", "third"):
        make_upstream(name).history(1)
    planted = Canaries()
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    values = {name: f"{planted.plant(name)}/@:%=x" for name in ("first", "second", "third")}
    for name, value in values.items():
        (secrets / name).write_text(value)
    proxy = planted.plant("proxy")
    inline = f"http://user:ab/{planted.plant('inline')}@"
    listen = f"127.0.0.1:{free_port()}"
    said, arguments = [], []
    with serving(tmp_path / "upstreams") as forge, daemon(start=False) as running:
        running.write_config(_configuration(forge, secrets, listen, proxy))
        running.start()
        forge.on_request = lambda: arguments.append(_arguments())

        def verb(*words: str, status: int = 0) -> str:
            ended = run(["--config", str(running.config), *words])
            said.append("".join(capsys.readouterr()))
            assert ended == status, said[-1]
            return said[-1]

        urls = {name: f"{forge.url}/{name}" for name in ("first", "second")}
        urls["third"] = "http://git.example.invalid/third"
        for name, url in urls.items():
            forge.password = values[name] if name != "third" else None
            forge.bearer = values[name] if name == "third" else None
            verb("mirror", "add", f"a/{name}", "--url", url)
            assert '"accepted": true' in verb("credential", "check", url, "--json")
            forge.password, forge.bearer = "other", None
            assert '"accepted": false' in verb("credential", "check", url, "--json", status=6)
            verb("mirror", "sync", f"a/{name}", status=6)
        verb("mirror", "add", "a/inline", "--url", f"{inline}host.invalid/x.git", status=2)
        verb("credential", "check", f"{inline}host.invalid/x.git", status=2)
        made = json.loads(verb("checkout", "a/first@main", "--json"))
        verb("receipt", made["id"])
        for words in (
            "mirror list",
            "status",
            "config show",
            "events",
            "operation list",
            "doctor",
        ):
            run(["--config", str(running.config), *words.split(), "--json"])
            said.append("".join(capsys.readouterr()))
        for kind in ("bundle create a/first", "doctor --report"):
            verb(*kind.split(), str(tmp_path / f"{kind.split()[0]}.out"))
        said.append(_unpacked(tmp_path / "doctor.out"))
        said.append((tmp_path / "bundle.out").read_bytes().decode("latin-1"))
        with urllib.request.urlopen(f"http://{listen}/mirrors") as page:
            said.append(page.read().decode())
        said.append(running.log)
        running.stop()
        files = [path for path in running.state_dir.rglob("*") if path.is_file()]
        for path in files:
            assert not planted.found_in(path.read_bytes()), path
    assert b"ls-remote" in b"".join(arguments)
    assert len(arguments) > 9
    assert planted.found_in(values["first"]) == {"first"}
    for text in [*said, *(each.decode(errors="replace") for each in arguments)]:
        assert not planted.found_in(text), text
