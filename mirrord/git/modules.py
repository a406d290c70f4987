"""The `.gitmodules` of a checkout's own tree, by the rules of git's fsck (fsck.c, 2.39)."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import CorruptObjectError, GitFailedError
from .command import run_git_sync
from .fsck import Blemish

MODULES_LIMIT_BYTES = 1 << 20  # git (2.39) reads half a GiB of it; one such file has 100 kB
# check_submodule_url of git: `../` up to the host led to another one (CVE-2020-11008)
_ABOVE_ROOT = re.compile(r"(?:\./)*(?:\.\./)(?:\.{1,2}/)*[:/]")
# `https::URL` names git's helper for HTTP
_WEB = re.compile(r"(?:https?|ftps?)::|(?:https?|ftps?)://", re.IGNORECASE)


def modules_blemishes(git_dir: Path, oid: str, size_bytes: int) -> Iterator[Blemish]:
    """Check the blob of a `.gitmodules`, which git itself parses."""
    if size_bytes > MODULES_LIMIT_BYTES:
        yield Blemish(oid, "gitmodulesLarge", f"it has {size_bytes} bytes")
        return
    try:
        # --null: a value may have line feeds
        words = ("config", f"--blob={oid}", "--null", "--list")
        listing = run_git_sync(*words, git_dir=git_dir, doing=f"read .gitmodules {oid}")
    except (CorruptObjectError, GitFailedError):
        return  # gitmodulesParse: git does not read it either
    for entry in listing.stdout.decode("utf-8", "surrogateescape").split("\0"):
        key, _, value = entry.partition("\n")
        section, _, rest = key.partition(".")
        name, _, variable = rest.rpartition(".")
        if section != "submodule" or "." not in rest:
            continue
        if not name or ".." in re.split(r"[/\\]", name):
            yield Blemish(oid, "gitmodulesName", f"disallowed submodule name: {name}")
        if variable == "url" and not is_sound_url(value):
            yield Blemish(oid, "gitmodulesUrl", f"disallowed submodule url: {value}")
        if variable == "path" and value.startswith("-"):
            yield Blemish(oid, "gitmodulesPath", f"disallowed submodule path: {value}")
        if variable == "update" and value.startswith("!"):
            yield Blemish(oid, "gitmodulesUpdate", f"disallowed submodule update setting: {value}")


def is_sound_url(url: str) -> bool:
    """Check the URL of a submodule: no option, no line feed, no way above its own host."""
    if url.startswith("-"):
        return False
    if url.startswith(("./", "../", "git://")):
        return "\n" not in unquote(url) and not _ABOVE_ROOT.match(url)
    if web := _WEB.match(url):
        rest = url if "://" in web[0] else url[web.end() :]
        try:
            parts = urlsplit(rest)
            is_whole = bool(parts.hostname)
        except ValueError:
            return False
        return is_whole and "\n" not in unquote(rest)
    return True
