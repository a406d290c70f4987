"""The environment and configuration that every git child gets: nothing of the caller's, everything said aloud.

Owns the table of safe configuration. It travels as GIT_CONFIG_COUNT and friends, not as `-c`, so that a process list shows the
command and nothing else; both outrank every configuration file. The one file in HOME is for what gets no environment of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ..host.processes import search_path

ALLOWED_PROTOCOLS = ("file", "git", "http", "https", "ssh")

_PASSED_ON = (
    "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""What a machine must be able to say about its way to the network."""

_SAFE: tuple[tuple[str, str], ...] = (
    # nothing of a repository's own configuration may run
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.attributesFile", "/dev/null"),
    ("core.excludesFile", "/dev/null"),
    ("core.pager", "cat"),
    ("core.editor", "false"),
    ("core.alternateRefsCommand", "true"),
    ("diff.external", ""),
    ("protocol.ext.allow", "never"),
    ("safe.directory", "*"),
    ("safe.bareRepository", "all"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("init.templateDir", ""),
    ("init.defaultBranch", "main"),
    # a replace ref changes what a recorded commit checks out to
    ("core.useReplaceRefs", "false"),
    # we say when a repository is packed
    ("gc.auto", "0"),
    ("gc.autoDetach", "false"),
    ("maintenance.auto", "false"),
    ("fetch.writeCommitGraph", "false"),
    # we write none, and git believes whatever one says
    ("pack.useBitmaps", "false"),
    # Gitaly's choice; git's default does not flush references
    ("core.fsync", "objects,derived-metadata,reference"),
    # land as packs: libgit2 1.9 hangs on a torn loose object
    ("transfer.unpackLimit", "1"),
    ("fetch.unpackLimit", "1"),
    ("pack.writeReverseIndex", "true"),
    ("http.followRedirects", "initial"),
    ("http.lowSpeedLimit", "1"),
    ("http.lowSpeedTime", "300"),
    ("credential.helper", ""),
    ("credential.interactive", "false"),
    ("user.name", "mirrord"),
    ("user.email", "mirrord@localhost"),
    ("fetch.fsckObjects", "true"),
)

_HARMLESS = (
    "badDate", "badDateOverflow", "badEmail", "badName", "badTimezone", "missingAuthor", "missingCommitter", "missingEmail",
    "missingNameBeforeEmail", "missingSpaceBeforeDate", "missingSpaceBeforeEmail", "missingTaggerEntry",
    "multipleAuthors", "nulInCommit", "zeroPaddedDate", "zeroPaddedFilemode",
)  # fmt: skip
"""fsck's names for slips that real histories have and that change no tree: who and when. What a tree holds stays strict."""

STRICT = "--strict=" + ",".join(f"{name}=ignore" for name in _HARMLESS)
"""The same for `git index-pack`, which reads no configuration about it."""

UNTRUSTING = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false")
"""Neither file is needed to read a repository, and each can hide that an object is missing."""

_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n"'
    ' "$MIRRORD_UPSTREAM_USERNAME" "$MIRRORD_UPSTREAM_PASSWORD"; }; f'
)


_OURS = (*_SAFE, *((f"fetch.fsck.{name}", "ignore") for name in _HARMLESS))


def _configured(config: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The variables that hand a configuration to git."""
    keys = {f"GIT_CONFIG_KEY_{number}": key for number, (key, _) in enumerate(config)}
    values = {f"GIT_CONFIG_VALUE_{number}": value for number, (_, value) in enumerate(config)}
    return {**keys, **values, "GIT_CONFIG_COUNT": str(len(config))}


_CONFIG = _configured(_OURS)


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream as git gets it: a URL without secrets for the command line, and the secrets apart."""

    url: str
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def is_http(self) -> bool:
        return self.url.lower().startswith(("http://", "https://"))

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(secret for secret in (self.password, self.username) if secret)


def child_environment(
    *, home: Path, remote: Remote | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment of one git child. `remote` adds its credentials, for that host only."""
    environment = _CONFIG | {
        "PATH": search_path(),
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "SSH_ASKPASS": "false",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=30",
        "GIT_ALLOW_PROTOCOL": ":".join(ALLOWED_PROTOCOLS),
        "GIT_NO_REPLACE_OBJECTS": "1",
        # a repository's own grafts and shallow file would cut history short; an empty name is git's own way to say "none"
        "GIT_GRAFT_FILE": "/nonexistent",
        "GIT_SHALLOW_FILE": "",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ADVICE": "0",
        "GIT_FLUSH": "0",  # else `rev-list` writes commit by commit into a pipe
    }
    if remote is not None:
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= _credentials(remote)
        environment |= (
            {"GIT_TRACE_CURL": "1", "GIT_TRACE_CURL_NO_DATA": "1"} if remote.is_http else {}
        )
    return environment | dict(extra or {})


def _credentials(remote: Remote) -> dict[str, str]:
    """A helper bound to scheme, host and port: a redirect to another host gets nothing."""
    if remote.username is None:
        return {}
    parts = urlsplit(remote.url)
    helper = _configured((*_OURS, (f"credential.{parts.scheme}://{parts.netloc}.helper", _HELPER)))
    return helper | {
        "MIRRORD_UPSTREAM_USERNAME": remote.username,
        "MIRRORD_UPSTREAM_PASSWORD": remote.password or "",
    }


def make_home(home: Path) -> None:
    """Make the directory that becomes HOME, once: written anew on a full disk its file would be empty.

    upload-pack of a local upstream gets none of our environment's configuration, and refuses a repository of another user.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = home / ".gitconfig", "[safe]\n\tdirectory = *\n"
    if not file.exists() or file.read_text(encoding="ascii") != text:
        new = home / ".gitconfig.new"
        new.write_text(text, encoding="ascii")
        new.rename(file)
