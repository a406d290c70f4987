"""What may lie in a git directory beside its objects, each with its exact form; everything else there is a leak.

A list of what is allowed, because one of what is forbidden is never whole: whoever hides a bundle chooses its name. Each form
answers with the objects that the file names, whose place inside the seal is judged elsewhere, and with what is wrong with it.
Configuration is read by git as a plain file: nothing it includes is followed, nothing it says is done.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..model import shown
from ..protocol import SealLeak
from .index import read_index
from .repository import ForeignFile, ForeignRepository, read_bytes, read_start, read_text, walk

_OID = re.compile(r"\b[0-9a-f]{40}\b")
_ONE_ID = re.compile(r"[0-9a-f]{40}\n?")
_SYMREF = re.compile(r"ref: refs/[^\s\x00-\x1f]+\n?")
_PACKED_HEADER = re.compile(r"# pack-refs with:( peeled| fully-peeled| sorted)* ?")
_PACKED_REF = re.compile(r"([0-9a-f]{40}) (refs/[^\s\x00-\x1f]+)|\^([0-9a-f]{40})")
_REFLOG = re.compile(
    r"([0-9a-f]{40}) ([0-9a-f]{40}) [^\n<>]{0,200}<[^\n<>]{0,200}> \d{1,12} [+-]\d{4}(\t[^\n]{0,200})?"
)
_SYMREF_DEPTH = 5
_ZERO = "0" * 40
_TEMPLATES = Path("/usr/share/git-core/templates")
_ARCHIVES = (b"PACK\0\0\0", b"# v2 git bundle\n", b"# v3 git bundle\n")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PK\3\4", b"\x28\xb5\x2f\xfd")

# Every setting that git itself writes into a new repository, mirrord's, and who commits. Values are as `git config` prints them.
_BOOLEAN = re.compile(r"true|false")
_SETTINGS = {
    "core.repositoryformatversion": re.compile("0"),
    "core.filemode": _BOOLEAN,
    "core.bare": _BOOLEAN,
    "core.logallrefupdates": re.compile("true|false|always"),
    "core.ignorecase": _BOOLEAN,
    "core.symlinks": _BOOLEAN,
    "core.precomposeunicode": _BOOLEAN,
    "core.trustctime": _BOOLEAN,
    "core.checkstat": re.compile("default|minimal"),
    "gc.auto": re.compile(r"\d{1,6}"),
    "user.name": re.compile(r"[^\n]{0,100}"),
    "user.email": re.compile(r"[^\n]{0,100}"),
}
_SETTING_KINDS = {
    "remote.": "remote",
    "url.": "remote",
    "include.": "include",
    "includeif.": "include",
    "submodule.": "submodule",
    "extensions.partialclone": "partial-clone",
    "extensions.refstorage": "unreadable",
    "extensions.objectformat": "unreadable",
}
_KINDS = {  # of what is never allowed
    "shallow": "shallow",
    "info/grafts": "graft",
    "reftable": "unreadable",
    "modules": "submodule",
    "worktrees": "shared-store",
    "remotes": "remote",
    "branches": "remote",
}


@dataclass(frozen=True, slots=True)
class Named:
    """One place that names an object. `kind` is the leak it would be."""

    kind: str
    where: str
    oid: str


Judgement = Iterator[Named | SealLeak]


def resolve_head(repository: ForeignRepository) -> str | None:
    """The commit that HEAD names, itself or through a branch."""
    text = read_text(repository.git_dir / "HEAD") or ""
    for _ in range(_SYMREF_DEPTH):
        if not text.startswith("ref:"):
            found = _OID.match(text.strip())
            return found[0] if found else None
        text = _ref_value(repository, text.removeprefix("ref:").strip())
    return None


def _ref_value(repository: ForeignRepository, ref: str) -> str:
    if ".." in ref:
        return ""
    for directory in repository.directories:
        if (value := read_text(directory / ref)) is not None:
            return value
    packed = (read_text(repository.common_dir / "packed-refs") or "").splitlines()
    return next(
        (oid for oid, _, name in (line.partition(" ") for line in packed) if name == ref), ""
    )


def judge_control(repository: ForeignRepository, private: Path) -> Judgement:
    """Every object that a file names, and every file that must not be there. `private` is a git directory of ours."""
    if repository.git_dir != repository.common_dir:
        yield leak(
            "shared-store",
            f"this is a linked worktree: its objects are those of {repository.common_dir.resolve()}",
        )
    if (repository.common_dir / "objects").is_symlink():
        yield leak("shared-store", "objects is a symbolic link")
    yield from (
        leak("alternate", f"objects are also read from {line}") for line in repository.alternates
    )
    for directory in repository.directories:
        for found in walk(directory, skip=frozenset({"objects"})):
            yield from _judge(found, private)


def _judge(found: ForeignFile, private: Path) -> Judgement:
    if found.kind == "unreadable":
        yield leak("unreadable", f"{found.where} cannot be read")
    elif found.kind != "file":
        yield leak("stray-file", f"{found.where} is a symbolic link, or no regular file")
    elif form := next((form for pattern, form in _FORMS if pattern.fullmatch(found.where)), None):
        content = read_bytes(found.path)
        if content is None:
            yield leak("unreadable", f"{found.where} cannot be read, or is too large")
        else:
            yield from form(found.where, content, private)
    else:
        yield from _unknown(found)


def _unknown(found: ForeignFile) -> Judgement:
    """Why a file that must not be there is what it is: the archive, or the objects that it names, say more than its name."""
    kind = next(
        (kind for place, kind in _KINDS.items() if f"{found.where}/".startswith(f"{place}/")), None
    )
    if kind:
        yield leak(kind, f"{found.where} is there")
    elif read_start(found.path).startswith((*_ARCHIVES, *_COMPRESSED)):
        yield leak("stray-file", f"{found.where} is a pack, a bundle or an archive")
    elif named := sorted(set(_OID.findall(read_text(found.path) or "")) - {_ZERO}):
        yield leak(
            "pseudo-ref",
            f"{found.where} is no part of a sealed repository, and names {', '.join(named[:5])}",
        )
    else:
        yield leak("stray-file", f"{found.where} is no part of a sealed repository")


# -- forms --------------------------------------------------------------------------------------------------------------


def _ref(where: str, content: bytes, _: Path) -> Judgement:
    """HEAD, ORIG_HEAD and loose refs: one id, or the name of another ref."""
    text = content.decode("utf-8", "surrogateescape")
    kind = _ref_kind(where)
    if _ONE_ID.fullmatch(text):
        if where != "HEAD":  # judged as the commit of the checkout
            yield Named(kind, where, text[:40])
    elif not _SYMREF.fullmatch(text):
        yield leak(
            "head" if where == "HEAD" else kind,
            f"{where} is neither an object id nor the name of a ref",
        )


def _ref_kind(where: str) -> str:
    if where.startswith("refs/replace/"):
        return "replace-ref"
    return {"refs/stash": "stash", "ORIG_HEAD": "pseudo-ref"}.get(where, "ref")


def _packed_refs(where: str, content: bytes, _: Path) -> Judgement:
    ref = where
    for number, line in enumerate(content.decode("utf-8", "surrogateescape").splitlines()):
        found = _PACKED_REF.fullmatch(line)
        if found:
            ref = found[2] or ref
            yield Named(_ref_kind(ref), ref, found[1] or found[3])
        elif number or not _PACKED_HEADER.fullmatch(line):
            yield leak("ref", f"line {number + 1} of {where} is not a ref")


def _reflog(where: str, content: bytes, _: Path) -> Judgement:
    for line in content.decode("utf-8", "surrogateescape").splitlines():
        found = _REFLOG.fullmatch(line)
        if found:
            yield from (Named("reflog", where, oid) for oid in found.group(1, 2) if oid != _ZERO)
        else:
            yield from (Named("reflog", where, oid) for oid in _OID.findall(line) if oid != _ZERO)
            yield leak("reflog", f"{where} has a line that git did not write")


def _index(where: str, content: bytes, _: Path) -> Judgement:
    try:
        index = read_index(content)
    except ValueError as error:
        yield leak("index", f"{where} is not exactly an index: {error}")
        return
    yield from (Named("index", where, oid.hex()) for oid in sorted(index.objects))
    yield from (
        Named("gitlink", path.decode("utf-8", "surrogateescape"), oid.hex())
        for path, oid in index.gitlinks.items()
    )


def _template(where: str, content: bytes, _: Path) -> Judgement:
    """What `git init` copies: the same bytes, as this host's git has them, or none."""
    if content.strip() and content != read_bytes(_TEMPLATES / where):
        yield leak("stray-file", f"{where} is not the one that git brings")


def _config(where: str, content: bytes, private: Path) -> Judgement:
    arguments = ("config", "--file=-", "--no-includes", "--list", "-z")
    try:
        listed = run_git_sync(
            *arguments, stdin=content, git_dir=private, doing=f"read {where}"
        ).stdout
    except (CorruptObjectError, GitFailedError) as error:
        yield leak("unreadable", error.message)
        return
    settings = [
        row.partition("\n") for row in listed.decode("utf-8", "surrogateescape").split("\0") if row
    ]
    unknown = {
        key
        for key, _, value in settings
        if key not in _SETTINGS or not _SETTINGS[key].fullmatch(value)
    }
    for key in sorted(unknown):
        kind = next(
            (kind for prefix, kind in _SETTING_KINDS.items() if key.startswith(prefix)),
            "configuration",
        )
        yield leak(kind, f"configured: {shown(key)}")
    if not unknown and re.search(rb"[#;]", content):
        yield leak("configuration", f"{where} has comments, which may hold anything")


_FORMS: tuple[tuple[re.Pattern[str], Callable[[str, bytes, Path], Judgement]], ...] = (
    (re.compile(r"HEAD|ORIG_HEAD|refs/.+"), _ref),
    (re.compile(r"packed-refs"), _packed_refs),
    (re.compile(r"logs/.+"), _reflog),
    (re.compile(r"index"), _index),
    (re.compile(r"config"), _config),
    (re.compile(r"description|info/exclude|hooks/[a-z-]+\.sample"), _template),
)


# -- the working tree ---------------------------------------------------------------------------------------------------


def judge_work_tree(repository: ForeignRepository) -> Iterator[SealLeak]:
    """Other repositories, bundles and packs beside the checkout's own files. What else an untracked file holds is not judged."""
    if repository.work_tree is None:
        return
    try:
        tracked = read_index(read_bytes(repository.git_dir / "index") or b"").paths
    except ValueError:
        tracked = set()
    for found in walk(repository.work_tree, skip=frozenset({".git"})):
        name = found.path.name
        if found.where == ".git" or os.fsencode(found.where) in tracked:
            continue
        if found.kind == "unreadable":
            yield leak("unreadable", f"{shown(found.where)} of the working tree cannot be read")
        elif name == ".git" or (name == "HEAD" and (found.path.parent / "objects").is_dir()):
            yield leak(
                "nested-repository",
                f"{shown(found.where)} of the working tree is of another repository",
            )
        elif found.kind == "file" and read_start(found.path).startswith(_ARCHIVES):
            yield leak(
                "stray-file", f"{shown(found.where)} of the working tree is a pack or a bundle"
            )


def leak(kind: str, detail: str) -> SealLeak:
    return SealLeak(kind=kind, detail=detail)
