"""`[[credential]]`: which one applies, that upstreams take it, and what is said when it cannot be used."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from forge import Forge, serving
from gitrepos import Upstream
from mirror_parts import NAME, Builder, House
from waiting import until

from mirrord.config import Settings
from mirrord.errors import (
    CertificateRefusedError,
    CredentialUnusableError,
    UpstreamAuthError,
    UpstreamError,
)
from mirrord.mirrors.upstreams import credentials
from mirrord.mirrors.upstreams.credentials import Credentials

pytestmark = pytest.mark.slow

PASSWORD = "a/b@c:d%e=s3cret"


@pytest.fixture
def upstream(make_upstream: Callable[..., Upstream]) -> Upstream:
    made = make_upstream("owner+name")
    made.history(2)
    return made


@pytest.fixture
def forge(upstream: Upstream) -> Iterator[Forge]:
    with serving(upstream.path.parent) as made:
        yield made


def house_with(tmp_path: Path, url: str, **entry: object) -> Builder:
    """Mirrors whose upstreams are asked with one entry."""
    house = Builder(tmp_path, f"{url}/{{owner}}+{{name}}")
    house.values["credential"] = [{"url": url, **entry}]
    return house


def written(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


async def _sync(it: House) -> None:
    await it.mirrors.add("owner/name")
    await it.mirrors.sync(NAME)


@pytest.mark.parametrize(
    ("url", "entry"),
    [
        ("https://git.example.com/a/b.git", "https://git.example.com/a"),
        ("https://git.example.com/ab/c.git", "https://git.example.com"),
        ("https://GIT.example.com:443/a/x", "https://git.example.com/a"),
        ("https://git.example.com:8443/a/x", None),
        ("https://git.example.com.evil.example/a/x", None),
        ("http://git.example.com/a/x", None),
        ("git@ssh.example.com:team/x.git", "git@ssh.example.com:team"),
        ("ssh://git@ssh.example.com/team/x.git", "git@ssh.example.com:team"),
        ("other@ssh.example.com:team/x.git", "ssh://ssh.example.com/"),
        ("/srv/git/x", None),
        ("https://registry.example.com/v2/team/image/manifests/1", "https://registry.example.com"),
        ("https://registry.example.com:5000/v2/team/image/blobs/x", None),
    ],
)
def test_the_longest_prefix_of_a_url_applies(url: str, entry: str | None) -> None:
    web = ("https://git.example.com", "https://git.example.com/a", "https://registry.example.com")
    shell = ("git@ssh.example.com:team", "ssh://ssh.example.com/")
    tables = [{"url": it, "password_file": "/x"} for it in web]
    tables += [{"url": it, "ssh_key": "/x"} for it in shell]
    chosen = Credentials(lambda: Settings.model_validate({"credential": tables})).find(url)
    assert (chosen.url if chosen else None) == entry


def test_a_password_is_read_before_each_exchange(
    tmp_path: Path, forge: Forge, upstream: Upstream
) -> None:
    """A token that is rotated, or ends during a fetch, needs no reload; it may have every character."""
    file = tmp_path / "password"
    house = house_with(tmp_path, forge.url, username="me", password_file=written(file, PASSWORD))
    forge.password = PASSWORD

    async def body(it: House) -> None:
        await _sync(it)
        upstream.history(1)
        forge.password = f"{PASSWORD}2"
        with pytest.raises(UpstreamAuthError, match="cannot") as caught:
            await it.mirrors.sync(NAME)
        assert forge.url in (caught.value.hint or "")
        assert PASSWORD not in str(caught.value.problem())
        written(file, f"{PASSWORD}2\n")
        assert (await it.mirrors.sync(NAME)).changed

        def rotate() -> None:
            if len(forge.requests) == last:
                forge.password = f"{PASSWORD}{last}"
                written(file, forge.password)

        forge.on_request = rotate
        for number in range(1, 5):  # the request of a sync before which the token ends
            upstream.history(1)
            last = len(forge.requests) + number
            assert (await it.mirrors.sync(NAME)).changed
            assert forge.password == f"{PASSWORD}{last}"

    house.run(body)


@pytest.mark.parametrize("printed", ["password=$1", "username=me\npassword=$1", "$1"])
def test_a_command_prints_a_password(tmp_path: Path, forge: Forge, printed: str) -> None:
    """Or git-credential's lines; it is asked as git asks its helpers."""
    program = tmp_path / "program"
    written(program, f'#!/bin/sh\ncat > {tmp_path}/asked\necho "{printed}"\n')
    program.chmod(0o700)
    forge.password = "s3cret"
    entry: dict[str, Any] = {"command": [str(program), "s3cret"]}
    if "username" not in printed:
        entry["username"] = "me"
    house_with(tmp_path, forge.url, **entry).run(_sync)
    host = forge.url.partition("://")[2]
    asked = f"protocol=http\nhost={host}\npath=owner+name\n\n"
    assert (tmp_path / "asked").read_text() == asked


def test_a_systemd_credential_is_a_password(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge.password = "s3cret"
    written(tmp_path / "forge", "s3cret")
    house = house_with(tmp_path, forge.url, username="me", systemd="forge")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(CredentialUnusableError, match="systemd") as caught:
        house.run(_sync)
    assert "LoadCredential=forge" in (caught.value.hint or "")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    house.run(_synced_again)


async def _synced_again(it: House) -> None:
    await it.mirrors.sync(NAME)


def test_a_bearer_token_goes_nowhere_else(tmp_path: Path, forge: Forge, upstream: Upstream) -> None:
    """Not even to another host that upstream redirects to: git would send the header on."""
    forge.bearer = "s3cret"
    house = house_with(tmp_path, forge.url, bearer_file=written(tmp_path / "token", "s3cret"))
    house.run(_sync)
    with serving(upstream.path.parent) as other:
        forge.answers = [(301, {"Location": f"{other.url}/owner+name/info/refs"})] * 5
        with pytest.raises(UpstreamError):
            house.run(_synced_again)
        assert other.requests == []


def test_a_password_does_not_follow_a_redirect(
    tmp_path: Path, forge: Forge, upstream: Upstream
) -> None:
    house = house_with(tmp_path, forge.url, password_file=written(tmp_path / "token", "s3cret"))
    with serving(upstream.path.parent) as other:
        other.password = "s3cret"
        forge.answers = [(301, {"Location": f"{other.url}/owner+name/info/refs"})] * 5
        with pytest.raises(UpstreamError):
            house.run(_sync)
        assert set(other.authorizations) <= {""}


def test_a_proxy_is_asked_for_the_url(tmp_path: Path, forge: Forge) -> None:
    house_with(tmp_path, "http://git.example.invalid", proxy=forge.url).run(_sync)
    assert forge.requests[0].startswith("http://git.example.invalid/owner+name/")


# -- certificates ---------------------------------------------------------------------------------


def make_certificate(directory: Path, name: str, authority: str = "", days: int = 2) -> Path:
    """A certificate for localhost, signed by another one or by itself; its key is beside it."""
    key, path = directory / f"{name}.key", directory / f"{name}.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", key, "-out", path, "-subj", f"/CN={name}", "-days", str(days),
        "-addext", "subjectAltName=DNS:localhost",
    ]  # fmt: skip
    if authority:
        signer = directory / authority
        command += ["-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"]
        command += ["-addext", "basicConstraints=critical,CA:false"]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return path


def make_expired(directory: Path, key: Path) -> Path:
    """A certificate of no days, for a key."""
    request, path = directory / "expired.csr", directory / "expired.pem"
    subject = ["openssl", "req", "-new", "-key", key, "-subj", "/CN=expired", "-out", request]
    sign = ["openssl", "x509", "-req", "-in", request, "-signkey", key, "-days", "0", "-out", path]
    for command in (subject, sign):
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
    check = ["openssl", "x509", "-checkend", "0", "-noout", "-in", str(path)]
    until(lambda: subprocess.run(check, capture_output=True, check=False).returncode == 1)
    return path


def test_a_private_ca_and_client_certificates(tmp_path: Path, upstream: Upstream) -> None:
    """Each part that is missing or wrong is told, and the mirror is synced with all."""
    ca, other = make_certificate(tmp_path, "ca"), make_certificate(tmp_path, "other")
    make_certificate(tmp_path, "server", "ca")
    client = make_certificate(tmp_path, "client", "ca")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    tls.load_verify_locations(ca)
    tls.verify_mode = ssl.CERT_REQUIRED
    parts = {"ca_file": ca, "client_cert": client, "client_key": tmp_path / "client.key"}
    with serving(upstream.path.parent, tls) as forge:

        def attempt(**changed: Path) -> None:
            used = {key: str(path) for key, path in {**parts, **changed}.items()}
            house_with(tmp_path, forge.url, **used).run(_checked)

        attempt()
        wrong = {
            "certificate": {"ca_file": other},
            "fit together": {"client_key": tmp_path / "ca.key"},
            "No such file": {"ca_file": tmp_path / "absent"},
            "client_cert .* has expired": {
                "client_cert": make_expired(tmp_path, parts["client_key"])
            },
        }
        for fact, changed in wrong.items():
            with pytest.raises(UpstreamError, match=fact) as caught:
                attempt(**changed)
            assert forge.url in f"{caught.value} {caught.value.hint}"
        with pytest.raises(CertificateRefusedError):
            attempt(ca_file=other)
        with pytest.raises(UpstreamError):  # without a certificate of a client
            attempt(client_cert=other, client_key=tmp_path / "other.key")


async def _checked(it: House) -> None:
    if not await it.mirrors.list_mirrors():
        await it.mirrors.add("owner/name")
    await it.mirrors.sync(NAME)


# -- what cannot be used --------------------------------------------------------------------------


def _bad_files(directory: Path) -> Iterator[tuple[str, str]]:
    yield str(directory / "absent"), "No such file"
    yield str(directory), "Is a directory"
    os.mkfifo(directory / "pipe")
    yield str(directory / "pipe"), "not a regular file"
    yield written(directory / "empty", "\n"), "is empty"
    yield written(directory / "lines", "s3cret\ns3cret2\n"), "several lines"
    yield written(directory / "long", "s" * 100_000), "too long"
    (directory / "binary").write_bytes(b"\xff\xfes3cret")
    yield str(directory / "binary"), "not UTF-8"


_BAD_COMMANDS = {
    "exec sleep 100": "did not end within",
    "exec sleep 100 >&- 2>&-": "did not end within",
    "yes s3cret": "prints more than",
    "yes s3cret >&2": "prints more than",
    "true": "printed nothing",
    "echo s3cret; echo s3cret": "several lines",
    "echo s3cret >&2; exit 3": "ended with status 3",
}


def test_a_secret_that_cannot_be_read_is_told(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the entry and a remedy, without the secret, within the deadline; the mirror serves on."""
    house = Builder(tmp_path, f"{forge.url}/{{owner}}+{{name}}").synced()
    count = len(forge.requests)
    table: list[tuple[dict[str, object], str]] = [
        ({"password_file": path}, fact) for path, fact in _bad_files(tmp_path)
    ]
    table += [({"command": ["sh", "-c", text]}, fact) for text, fact in _BAD_COMMANDS.items()]
    table.append(({"command": [str(tmp_path / "absent")]}, "is not a program"))
    table.append(({"ca_file": str(tmp_path / "empty")}, "are no PEM files"))
    for entry, fact in table:
        house.values["credential"] = [{"url": forge.url, **entry}]
        limit = timedelta(seconds=1 if "sleep" in str(entry) else 60)
        monkeypatch.setattr(credentials, "COMMAND_TIMEOUT", limit)

        async def body(it: House, fact: str = fact) -> None:
            with pytest.raises(CredentialUnusableError, match=fact) as caught:
                await it.mirrors.sync(NAME)
            assert forge.url in caught.value.message
            assert caught.value.hint
            assert "s3cret" not in str(caught.value.problem())
            assert (await it.mirrors.resolve(NAME, "main")).commit

        house.run(body)
    assert len(forge.requests) == count


# -- GitHub Apps ----------------------------------------------------------------------------------


class Api:
    """GitHub's endpoints of Apps. `token` is handed out, for `lifetime`, to who signs with `key`."""

    def __init__(self, key: Path) -> None:
        self.key, self.token, self.lifetime = key, "ghs_first", timedelta(hours=1)
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str, claim: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if not self._is_signed(claim.removeprefix("Bearer ")):
            return 401, {"message": "A JSON web token could not be decoded"}
        if path == "/users/owner/installation":
            return 200, {"id": 7}
        if path != "/app/installations/7/access_tokens":
            return 404, {"message": "Not Found"}
        end = datetime.now(UTC) + self.lifetime
        return 201, {"token": self.token, "expires_at": f"{end:%Y-%m-%dT%H:%M:%SZ}"}

    def _is_signed(self, claim: str) -> bool:
        text, _, signature = claim.rpartition(".")
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.key)]
        made = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
        from_url = base64.urlsafe_b64encode(made.stdout).rstrip(b"=").decode()
        claims = json.loads(_decoded(text.partition(".")[2]))
        return from_url == signature and claims["iss"] == "12" and bool(claims["exp"] > time.time())


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@contextmanager
def serving_api(key: Path) -> Iterator[Api]:
    api = Api(key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, answer = api.answer(self.path, self.headers.get("Authorization", ""))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield api
        server.shutdown()
        thread.join()


def make_key(path: Path) -> Path:
    command = ["openssl", "genpkey", "-algorithm", "RSA", "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_a_github_app_asks_for_tokens_and_renews_them(tmp_path: Path, forge: Forge) -> None:
    """A token is used again until five minutes before its end, or until upstream refuses it."""
    key = make_key(tmp_path / "app.pem")
    with serving_api(key) as api:
        app = {"id": 12, "owner": "owner", "key_file": str(key), "api": api.url}
        house = house_with(tmp_path, forge.url, github_app=app)
        forge.user, forge.password = "x-access-token", "ghs_first"

        async def body(it: House) -> None:
            await _sync(it)
            await it.mirrors.sync(NAME)
            assert len(api.asked) == 2  # installation and token, once for all exchanges
            forge.password = api.token = "ghs_second"
            api.lifetime = timedelta(minutes=4)
            await it.mirrors.sync(NAME)  # revoked early, so asked for anew
            before = len(api.asked)
            await it.mirrors.sync(NAME)
            assert len(api.asked) > before
            make_key(key)
            api.key = make_key(tmp_path / "new.pem")
            with pytest.raises(CredentialUnusableError, match="answers 401") as caught:
                await it.mirrors.sync(NAME)
            assert "App 12" in (caught.value.hint or "")
            assert "ghs_" not in str(caught.value.problem())
            key.write_text("no key")
            with pytest.raises(CredentialUnusableError) as caught:
                await it.mirrors.sync(NAME)
            assert f"{key} must be a private RSA key" in (caught.value.hint or "")
            key.unlink()
            with pytest.raises(CredentialUnusableError, match=f"key_file {key}: No such file"):
                await it.mirrors.sync(NAME)

        house.run(body)
