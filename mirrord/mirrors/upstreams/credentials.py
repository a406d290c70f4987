"""Credentials of upstreams: which `[[credential]]` applies to a URL, and its secret, read anew.

A secret is read before each exchange, from a file or a command, and kept nowhere; only tokens of a
GitHub App are remembered, in memory, until shortly before they end. Every failure names the entry.
"""

import os
import shutil
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from ...config import CredentialSettings, Settings
from ...errors import CredentialUnusableError, MirrordError, UpstreamAuthError, UpstreamError
from ...git.configuration import Remote
from ...host.children import Child, in_memory, start
from ...host.files import open_plain
from ...host.processes import search_path
from ...presence import exists
from ...telemetry import masked
from . import github_app
from .upstream import Upstream

_Answer = TypeVar("_Answer")

# a command that asks a person for something waits for ever: it has no terminal
COMMAND_TIMEOUT = timedelta(seconds=30)
# a JWT with many claims has some kB; a file named by mistake may have any length
_LONGEST_SECRET = 64 * 1024
# `https://host` and `https://host:443` are one destination
_PORTS = {"https": 443, "http": 80, "ssh": 22}


class Destination(NamedTuple):
    """Where a URL leads; `user` is of ssh alone."""

    scheme: str
    user: str | None
    host: str
    port: int | None
    path: tuple[str, ...]

    def covers(self, other: "Destination") -> bool:
        """Return whether the other URL is below this one. Whole path components are compared."""
        return (
            (self.scheme, self.host, self.port) == (other.scheme, other.host, other.port)
            and self.user in (None, other.user)
            and other.path[: len(self.path)] == self.path
        )


def destination_of(url: str) -> Destination | None:
    """Read a URL of HTTP or ssh, or an scp-like one."""
    if "://" not in url:
        address, colon, path = url.partition(":")
        if not colon or url.startswith("/"):
            return None
        user, sign, host = address.rpartition("@")
        return Destination("ssh", user if sign else None, host.lower(), 22, _components(path))
    try:
        parts = urlsplit(url)
        scheme, port = parts.scheme.lower(), parts.port
    except ValueError:
        return None
    if scheme not in _PORTS or not parts.hostname:
        return None
    login = parts.username if scheme == "ssh" else None
    return Destination(
        scheme, login, parts.hostname, port or _PORTS[scheme], _components(parts.path)
    )


def _components(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split("/")))


# of one fetch, each with a new secret: a command may print another wrong one every time
_EXCHANGES_MAX = 3


class Credentials:
    """The entries of the settings in force. One for a daemon: it holds tokens of GitHub Apps."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._tokens = github_app.Tokens()

    def find(self, url: str) -> CredentialSettings | None:
        """Return the entry with the longest prefix of a URL."""
        if (wanted := destination_of(url)) is None:
            return None
        places = ((destination_of(entry.url), entry) for entry in self._settings().credential)
        fitting = [(place, entry) for place, entry in places if place and place.covers(wanted)]
        longest = max(
            fitting, key=lambda it: (len(it[0].path), it[0].user is not None), default=None
        )
        return longest[1] if longest else None

    @asynccontextmanager
    async def used(self, upstream: Upstream) -> AsyncIterator[Remote]:
        """Give an upstream with what it is asked with now; an error of the block names the entry.

        A secret of an entry replaces the one in the URL.
        """
        entry = self.find(upstream.remote.url)
        if entry is None:
            yield upstream.remote
            return
        remote = await self._equip(upstream.remote, entry)
        try:
            yield remote
        except UpstreamError as error:
            if error.http_status and type(error).code in _BLAMED:
                self._tokens.forget(entry)
                error.hint = f"[[credential]] {entry.url} was used: {error.hint}"
                error.facts["credential"] = entry.url
            raise

    async def exchange(
        self, upstream: Upstream, call: Callable[[Remote], Awaitable[_Answer]]
    ) -> _Answer:
        """Call with what upstream is asked with now; again where it refused a secret that is over.

        A token may end between two requests of one exchange.
        """
        refused: UpstreamAuthError | None = None
        tried: list[tuple[str, ...]] = []
        while refused is None or len(tried) < _EXCHANGES_MAX:
            try:
                async with self.used(upstream) as remote:
                    if refused is not None and remote.secrets in tried:
                        break
                    tried.append(remote.secrets)
                    return await call(remote)
            except CredentialUnusableError:
                raise
            except UpstreamAuthError as error:
                refused = error
        raise refused

    async def _equip(self, remote: Remote, entry: CredentialSettings) -> Remote:
        await to_thread.run_sync(_check_files, entry)
        await _must_not_have_expired(entry)
        parts: dict[str, Any] = {
            name: getattr(entry, name) for name in _PASSED_ON if getattr(entry, name)
        }
        parts |= await self.secret(entry, remote.url)
        return replace(remote, **parts)

    async def secret(self, entry: CredentialSettings, url: str) -> dict[str, str]:
        """Read the secret of an entry, as fields of `Remote`; raises CredentialUnusableError."""
        user = entry.username or "x-access-token"
        if entry.bearer_file:
            return {"bearer": await to_thread.run_sync(_read, entry, entry.bearer_file)}
        if entry.command:
            answer = {"username": user} | _parse(entry, await _run(entry, entry.command, url))
            if entry.username:
                answer["username"] = entry.username
            return answer
        if entry.github_app:
            await to_thread.run_sync(_check_file, entry, "key_file", entry.github_app.key_file)
            token = await self._tokens.get(entry, _runner(entry, entry.github_app.key_file))
            return {"username": "x-access-token", "password": token}
        path = entry.password_file
        if entry.systemd:
            path = _systemd_file(entry, entry.systemd)
        if path is None:
            return {}
        return {"username": user, "password": await to_thread.run_sync(_read, entry, path)}

    async def check(self, entry: CredentialSettings) -> None:
        """Read all that an entry names, without asking an upstream."""
        await to_thread.run_sync(_check_files, entry)
        await self.secret(entry, entry.url)


_PASSED_ON = (
    "ca_file", "client_cert", "client_key", "proxy", "ssh_key", "known_hosts", "accept_new",
)  # fmt: skip
_BLAMED = {
    "certificate-refused",
    "upstream-auth",
    "upstream-failed",
    # forges answer 404, not 403, to who may not see a repository
    "upstream-not-found",
    "ssh-key-refused",
}


def unusable(entry: CredentialSettings, fact: str, hint: str) -> CredentialUnusableError:
    return CredentialUnusableError(
        f"cannot use [[credential]] {entry.url}: {masked(fact)}", hint=hint, credential=entry.url
    )


# -- files ----------------------------------------------------------------------------------------


def _read(entry: CredentialSettings, path: Path) -> str:
    """Read one line: a file of many is another file than was meant."""
    try:
        with open_plain(path) as file:
            content = file.read(_LONGEST_SECRET + 1)
        text = content.decode().rstrip("\r\n")
    except OSError as error:
        hint = f"make {path} a file that the daemon's user (uid {os.geteuid()}) can read"
        raise unusable(entry, f"{path}: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        raise unusable(entry, f"{path} is not UTF-8", "write the secret into it") from error
    if not text or len(content) > _LONGEST_SECRET or not _is_line(text):
        fact = f"{path} is empty, too long or has several lines"
        raise unusable(entry, fact, f"write the secret into {path}, and nothing else")
    return text


def _is_line(text: str) -> bool:
    return not any(character in text for character in "\0\r\n")


def _systemd_file(entry: CredentialSettings, name: str) -> Path:
    if directory := os.environ.get("CREDENTIALS_DIRECTORY"):
        return Path(directory, name)
    hint = f"put LoadCredential={name}:/path/of/the/file into the unit; docs/users.md"
    raise unusable(entry, "systemd gave no credentials to this process", hint)


def _check_files(entry: CredentialSettings) -> None:
    """Open the files that ssh and git read themselves, whose errors would not name the entry."""
    for key in ("ssh_key", "known_hosts", "ca_file", "client_cert", "client_key"):
        path: Path | None = getattr(entry, key)
        if path is None or (key == "known_hosts" and entry.accept_new and not exists(path)):
            continue
        _check_file(entry, key, path)
    if entry.ca_file or entry.client_cert:
        _check_certificates(entry)


def _check_file(entry: CredentialSettings, key: str, path: Path) -> None:
    try:
        open_plain(path).close()
    except OSError as error:
        hint = f"make {path} a file that the daemon's user (uid {os.geteuid()}) can read"
        raise unusable(entry, f"{key} {path}: {error.strerror}", hint) from error


def _check_certificates(entry: CredentialSettings) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if entry.ca_file:
            context.load_verify_locations(entry.ca_file)
        if entry.client_cert:
            # without this, OpenSSL asks for a passphrase on the terminal, and waits
            context.load_cert_chain(entry.client_cert, entry.client_key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        fact = f"its certificates or their key are no PEM files that fit together: {error}"
        hint = "see `openssl x509 -in FILE -text`; a key must have no passphrase"
        raise unusable(entry, fact, hint) from error
    ends = [ssl.cert_time_to_seconds(str(it["notAfter"])) for it in context.get_ca_certs()]
    # files of CAs keep expired certificates; one that is valid is enough
    if ends and max(ends) < time.time():
        fact = f"every certificate of ca_file {entry.ca_file} has expired"
        raise unusable(entry, fact, "get the present certificate of that CA")


async def _must_not_have_expired(entry: CredentialSettings) -> None:
    """Raise CredentialUnusableError for a client's certificate that has expired.

    The ssl module reads no dates of it; without openssl, the upstream's refusal tells.
    """
    if not entry.client_cert or not shutil.which("openssl", path=search_path()):
        return
    with in_memory(b"") as file, anyio.fail_after(COMMAND_TIMEOUT.total_seconds()):
        words = ("openssl", "x509", "-checkend", "0", "-noout", "-in", str(entry.client_cert))
        process = start([*_UNPRIVILEGED, *words], dict(os.environ), Path("/"), file)
        async with Child(process) as child, anyio.create_task_group() as group:
            output = bytearray()
            group.start_soon(_drain, child.read_stderr)
            while piece := await child.read_stdout():
                output.extend(piece)
    if b"will expire" in output:
        fact = f"client_cert {entry.client_cert} has expired"
        raise unusable(entry, fact, "ask the forge's administrator for a new certificate")


async def _drain(read: Callable[[], Any]) -> None:
    while await read():
        pass


def _no_password() -> str:
    raise ValueError("the key has a passphrase")


# -- commands -------------------------------------------------------------------------------------


def _runner(entry: CredentialSettings, key: Path) -> github_app.Run:
    hint = f"{key} must be a private RSA key of the App, in PEM and without a passphrase"

    async def run(*argv: str, stdin: bytes) -> bytes:
        return await _output(entry, argv, stdin, hint)

    return run


async def _run(entry: CredentialSettings, command: tuple[str, ...], url: str) -> bytes:
    """Run a command with git-credential's question on stdin."""
    parts = urlsplit(url)
    question = f"protocol={parts.scheme}\nhost={parts.netloc}\npath={parts.path.lstrip('/')}\n\n"
    hint = f"run it by hand as uid {os.geteuid()}: it prints a password, or username= and password="
    return await _output(entry, command, question.encode(), hint)


# as git is started: without the ambient capabilities that systemd gives to the daemon
_UNPRIVILEGED = ("setpriv", "--ambient-caps=-all", "--pdeathsig", "KILL")


async def _output(
    entry: CredentialSettings, argv: tuple[str, ...], stdin: bytes, hint: str
) -> bytes:
    """Run a program within a deadline; it has the daemon's environment."""
    program = shutil.which(argv[0], path=search_path())
    if program is None:
        hint = "give the absolute path of a program that the daemon's user may run"
        raise unusable(entry, f"{argv[0]} is not a program", hint)
    output, said = bytearray(), bytearray()

    async def read(source: Callable[[], Any], into: bytearray) -> None:
        while piece := await source():
            into.extend(piece)
            if len(into) > _LONGEST_SECRET:
                child.signal(signal.SIGKILL)
                return

    try:
        with in_memory(stdin) as file, anyio.fail_after(COMMAND_TIMEOUT.total_seconds()):
            process = start([*_UNPRIVILEGED, program, *argv[1:]], dict(os.environ), Path("/"), file)
            async with Child(process) as child, anyio.create_task_group() as group:
                group.start_soon(read, child.read_stderr, said)
                await read(child.read_stdout, output)
                status = await child.wait()
    except TimeoutError as error:
        fact = f"{argv[0]} did not end within {COMMAND_TIMEOUT.total_seconds():g} s"
        raise unusable(entry, fact, hint) from error
    except MirrordError as error:
        raise unusable(entry, f"{argv[0]}: {error.__cause__ or error.message}", hint) from error
    if max(len(output), len(said)) > _LONGEST_SECRET:
        raise unusable(entry, f"{argv[0]} prints more than {_LONGEST_SECRET} bytes", hint)
    if status:
        # its own words may be secrets
        raise unusable(entry, f"{argv[0]} ended with status {status}", hint)
    return bytes(output)


def _parse(entry: CredentialSettings, output: bytes) -> dict[str, str]:
    text = output.decode(errors="replace").rstrip("\r\n")
    pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if "password" in pairs:
        return {key: pairs[key] for key in ("username", "password") if pairs.get(key)}
    if text and _is_line(text):
        return {"password": text}
    hint = "it prints a password on one line, or username= and password="
    command = (entry.command or ("",))[0]
    raise unusable(entry, f"{command} printed nothing or several lines", hint)
