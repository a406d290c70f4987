"""The environment of a git child: explicit, nothing inherited, with our safe configuration in it.

The configuration is passed by GIT_CONFIG_COUNT and friends instead of `-c`, so that a process
list shows only the command. Both outrank every configuration file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ..host.processes import search_path

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
    ("protocol.ext.allow", "never"),
    ("safe.directory", "*"),
    ("safe.bareRepository", "all"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
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
    "badDate", "badDateOverflow", "badEmail", "badName", "badTimezone", "missingAuthor",
    "missingCommitter", "missingEmail", "missingNameBeforeEmail", "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail", "missingTaggerEntry", "multipleAuthors", "nulInCommit",
    "zeroPaddedDate", "zeroPaddedFilemode",
)  # fmt: skip
"""fsck's names for faults in authors and dates, which real histories have; no tree is affected."""

STRICT = "--strict=" + ",".join(f"{name}=ignore" for name in _HARMLESS)
"""For `git index-pack`, which does not read `fetch.fsck.*`."""

UNTRUSTING = ("-c", "core.commitGraph=false", "-c", "core.multiPackIndex=false")
"""Options of git: both files are optional, and each can hide that an object is missing."""

_CONFIGURATION = (*_SAFE, *((f"fetch.fsck.{name}", "ignore") for name in _HARMLESS))


def _as_variables(configuration: Sequence[tuple[str, str]]) -> dict[str, str]:
    environment = {"GIT_CONFIG_COUNT": str(len(configuration))}
    for number, (key, value) in enumerate(configuration):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


_VARIABLES = _as_variables(_CONFIGURATION)


@dataclass(frozen=True, slots=True)
class Remote:
    """An upstream: a URL without secrets, for the command line, and the credentials."""

    url: str
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def is_http(self) -> bool:
        return self.url.lower().startswith(("http://", "https://"))

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(secret for secret in (self.password, self.username) if secret)


_PASSED_ON = (
    "SSH_AUTH_SOCK", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "all_proxy",
    "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""How this machine reaches the network."""
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
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "false",
        "SSH_ASKPASS": "false",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=30",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "GIT_NO_REPLACE_OBJECTS": "1",
        # a repository's grafts and shallow file would cut history short; empty means none
        "GIT_GRAFT_FILE": "/nonexistent",
        "GIT_SHALLOW_FILE": "",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ADVICE": "0",
        "GIT_FLUSH": "0",  # else `rev-list` flushes each commit into a pipe
    }
    if remote is not None:
        environment |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        if remote.is_http:
            environment |= {"GIT_TRACE_CURL": "1", "GIT_TRACE_CURL_NO_DATA": "1"}
        if remote.username is not None:
            # bound to scheme, host and port: a redirect to another host gets nothing
            parts = urlsplit(remote.url)
            helper = f"credential.{parts.scheme}://{parts.netloc}.helper"
            environment |= _as_variables((*_CONFIGURATION, (helper, _HELPER)))
            environment["MIRRORD_UPSTREAM_USERNAME"] = remote.username
            environment["MIRRORD_UPSTREAM_PASSWORD"] = remote.password or ""
    return environment | dict(extra or {})


def make_home(home: Path) -> None:
    """Make the directory that becomes HOME, with a .gitconfig.

    upload-pack of a local upstream ignores configuration in the environment, and refuses a
    repository of another user. An intact file is kept: on a full disk a rewrite would empty it.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    file, text = home / ".gitconfig", "[safe]\n\tdirectory = *\n"
    if not file.exists() or file.read_text(encoding="ascii") != text:
        new = home / ".gitconfig.new"
        new.write_text(text, encoding="ascii")
        new.rename(file)
