"""The environment of a git child: explicit, nothing inherited, with our safe configuration in it.

The configuration is passed by GIT_CONFIG_COUNT and friends instead of `-c`, so that a process
list shows only the command. Both outrank every configuration file.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from ..host.processes import search_path
from ..presence import exists
from .fsck import FETCH

_SAFE: tuple[tuple[str, str], ...] = (
    # no program that a repository's own configuration names may run
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.attributesFile", "/dev/null"),
    ("core.excludesFile", "/dev/null"),
    ("core.pager", "cat"),
    ("core.editor", "false"),
    ("core.alternateRefsCommand", "true"),
    ("diff.external", ""),
    # the URL of `ext::` is a command
    ("protocol.ext.allow", "never"),
    # else git refuses repositories of other users; what could run from one is off above
    ("safe.directory", "*"),
    ("safe.bareRepository", "all"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    # a distribution's template would put hooks and excludes into each new repository
    ("init.templateDir", ""),
    ("init.defaultBranch", "main"),
    # a replace ref changes what a recorded commit checks out to
    ("core.useReplaceRefs", "false"),
    # only `mirrors/maintenance.py` packs a mirror
    ("gc.auto", "0"),
    ("gc.autoDetach", "false"),
    ("maintenance.auto", "false"),
    ("fetch.writeCommitGraph", "false"),
    # we write none, and git does not verify a bitmap
    ("pack.useBitmaps", "false"),
    # as Gitaly does; git's default does not flush references
    ("core.fsync", "objects,derived-metadata,reference"),
    # fetched objects stay in packs: libgit2 1.9 hangs on a truncated loose object
    ("transfer.unpackLimit", "1"),
    ("fetch.unpackLimit", "1"),
    # the default since git 2.41; without it each git that packs sorts the offsets again
    ("pack.writeReverseIndex", "true"),
    # a redirect of a later request could lead a part of an exchange elsewhere
    ("http.followRedirects", "initial"),
    # together: a transfer is given up after five minutes of less than a byte a second
    ("http.lowSpeedLimit", "1"),
    ("http.lowSpeedTime", "300"),
    # the empty name clears the list of helpers of every file read before
    ("credential.helper", ""),
    ("credential.interactive", "false"),
    ("user.name", "mirrord"),
    ("user.email", "mirrord@localhost"),
    # off by default; FETCH lists what real histories have and a mirror takes all the same
    ("fetch.fsckObjects", "true"),
)

# options of git: both files are optional, and each can hide that an object is missing
UNTRUSTING = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false")

_CONFIGURATION = (*_SAFE, *FETCH)


def _as_variables(configuration: Sequence[tuple[str, str]]) -> dict[str, str]:
    environment = {"GIT_CONFIG_COUNT": str(len(configuration))}
    for number, (key, value) in enumerate(configuration):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


_VARIABLES = _as_variables(_CONFIGURATION)
# ssh prompts by itself, whatever GIT_TERMINAL_PROMPT says; BatchMode makes that an error
_SSH = ("ssh", "-oBatchMode=yes", "-oConnectTimeout=30")


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream: a URL without secrets, for the command line, and what it is asked with."""

    url: str
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    bearer: str | None = field(default=None, repr=False)
    proxy: str | None = field(default=None, repr=False)
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    ssh_key: Path | None = None
    known_hosts: Path | None = None
    accept_new: bool = False

    @property
    def is_http(self) -> bool:
        return self.url.lower().startswith(("http://", "https://"))

    @property
    def secrets(self) -> tuple[str, ...]:
        proxy = urlsplit(self.proxy or "").password
        plain = [text for text in (self.password, self.username, self.bearer, proxy) if text]
        return (*plain, *(quote(text, safe="") for text in plain))

    @property
    def is_ssh(self) -> bool:
        """True for ssh:// and for the scp-like user@host:path."""
        scheme, colon, _ = self.url.partition("://")
        return scheme.lower() == "ssh" if colon else not self.url.startswith("/")


# how this machine reaches the network
_PASSED_ON = (
    "SSH_AUTH_SOCK", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip

# Debian's git is linked with GnuTLS, and reads neither variable of OpenSSL
_OPENSSL_NAMES = {"SSL_CERT_FILE": "GIT_SSL_CAINFO", "SSL_CERT_DIR": "GIT_SSL_CAPATH"}
_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n"'
    ' "$MIRRORD_UPSTREAM_USERNAME" "$MIRRORD_UPSTREAM_PASSWORD"; }; f'
)


def child_environment(
    *, home: Path, remote: Remote | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the whole environment of a git child. `remote`'s credentials serve its host only."""
    environment = _VARIABLES | {
        "PATH": search_path(),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        # nothing of this machine's configuration decides what a mirror has
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "SSH_ASKPASS": "false",
        "GIT_SSH_COMMAND": shlex.join(_SSH),
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "GIT_NO_REPLACE_OBJECTS": "1",
        # a repository's grafts and shallow file would cut history short; empty means none
        "GIT_GRAFT_FILE": "/nonexistent",
        "GIT_SHALLOW_FILE": "",
        # a missing object must be missing, not be asked for from a promisor
        "GIT_NO_LAZY_FETCH": "1",
        # else commands that only look, like `git status`, lock and rewrite the index
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ADVICE": "0",
        "GIT_FLUSH": "0",  # else `rev-list` flushes each commit into a pipe
    }
    if remote is not None:
        environment |= _remote_environment(remote)
    return environment | dict(extra or {})


def _remote_environment(remote: Remote) -> dict[str, str]:
    """Return what git needs to reach an upstream; secrets are in no argument of any process."""
    environment = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    for name, of_git in _OPENSSL_NAMES.items():
        if os.environ.get(name):
            environment.setdefault(of_git, os.environ[name])
    if remote.is_ssh:
        environment["GIT_SSH_COMMAND"] = _ssh_command(remote)
    if not remote.is_http:
        return environment
    # the trace of headers has the status and Retry-After, which git's message has not
    environment |= {"GIT_TRACE_CURL": "1", "GIT_TRACE_CURL_NO_DATA": "1"}
    if remote.ca_file:  # the variable would outrank the configuration
        environment.pop("GIT_SSL_CAINFO", None)
    if remote.username is not None:
        environment["MIRRORD_UPSTREAM_USERNAME"] = remote.username
        environment["MIRRORD_UPSTREAM_PASSWORD"] = remote.password or ""
    return environment | _as_variables((*_CONFIGURATION, *_http_configuration(remote)))


def _http_configuration(remote: Remote) -> Iterator[tuple[str, str]]:
    """Yield settings bound to scheme, host and port: a redirect to another host gets nothing."""
    parts = urlsplit(remote.url)
    place = f"{parts.scheme}://{parts.netloc}"
    if remote.username is not None:
        yield f"credential.{place}.helper", _HELPER
    if remote.bearer is not None:
        yield f"http.{place}/.extraHeader", f"Authorization: Bearer {remote.bearer}"
        # git (2.39) sends the header to where a redirect leads, in the requests that follow it
        yield "http.followRedirects", "false"
    files = {
        "sslCAInfo": remote.ca_file,
        "sslCert": remote.client_cert,
        "sslKey": remote.client_key or remote.client_cert,
    }
    yield from ((f"http.{place}/.{key}", str(path)) for key, path in files.items() if path)
    if remote.proxy:
        yield f"http.{place}/.proxy", remote.proxy


def _ssh_command(remote: Remote) -> str:
    """Return the command for git's shell. -v names the host's key, which an error quotes."""
    words = [*_SSH, "-v"]
    if remote.ssh_key:
        words += [f"-oIdentityFile={_ssh_path(remote.ssh_key)}"]
        # else ssh offers an agent's keys first, and a server counts them as failures
        words += ["-oIdentitiesOnly=yes", "-oIdentityAgent=none"]
    if remote.known_hosts:
        policy = "accept-new" if remote.accept_new else "yes"
        words += [f"-oUserKnownHostsFile={_ssh_path(remote.known_hosts)}"]
        # the file that is named decides alone
        words += ["-oGlobalKnownHostsFile=/dev/null", f"-oStrictHostKeyChecking={policy}"]
    return shlex.join(words)


def _ssh_path(path: Path) -> str:
    # ssh splits the value of an option at blanks, and expands %h and the like in it
    return '"' + str(path).replace("%", "%%") + '"'


def make_home(home: Path) -> None:
    """Make the directory that becomes HOME, with a .gitconfig.

    upload-pack of a local upstream ignores configuration in the environment, and refuses a
    repository of another user. An intact file is kept: on a full disk a rewrite would empty it.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = home / ".gitconfig", "[safe]\n\tdirectory = *\n"
    if not exists(file) or file.read_text(encoding="ascii") != text:
        new = home / ".gitconfig.new"
        new.write_text(text, encoding="ascii")
        new.rename(file)
