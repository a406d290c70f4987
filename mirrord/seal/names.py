"""The files that a git directory may have beside its objects, each with its exact form.

What is allowed is listed, because a list of what is forbidden is never complete. Each form yields
the objects that the file names, which `verify.py` judges, and the faults of the file. git reads
configuration as a plain file, without following includes.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import CorruptObjectError, GitFailedError
from ..git.command import run_git_sync
from ..git.lfs import FILTER, OBJECTS
from ..model import shown
from ..presence import is_dir, is_symlink
from ..protocol import SealLeak
from ..quoting import decode_name
from .index import read_index
from .repository import (
    PACKS,
    ForeignFile,
    ForeignRepository,
    read_bytes,
    read_text,
    repository_at,
    walk,
)

_OID = re.compile(r"\b[0-9a-f]{40}\b")
# a ref that does not exist, in reflogs
_ZERO = "0" * 40
# beside its objects
_OF_STORE = {"HEAD", "config", "packed-refs"}
_JUDGED_APART = frozenset({"objects", OBJECTS})
_TEMPLATES = Path("/usr/share/git-core/templates")

# refstorage: reftable; objectformat: SHA-256. Neither is read here.
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
_KINDS = {  # of leak, by files that are never allowed
    "shallow": "shallow",
    "info/grafts": "graft",
    "reftable": "unreadable",
    "modules": "submodule",
    "worktrees": "shared-store",
    "remotes": "remote",
    "branches": "remote",
}


class Named(NamedTuple):
    """A place that names an object; `kind` is that of the leak if the object is outside."""

    kind: str
    where: str
    oid: str


Judgement = Iterator[Named | SealLeak]


def leak(kind: str, detail: str) -> SealLeak:
    return SealLeak(kind=kind, detail=detail)


# as git's SYMREF_MAXDEPTH
_SYMREF_DEPTH = 5


def resolve_head(repository: ForeignRepository) -> str | None:
    """Return the commit that HEAD means, directly or through a branch."""
    text = read_text(repository.git_dir / "HEAD") or ""
    for _ in range(_SYMREF_DEPTH):
        if not text.startswith("ref:"):
            match = _OID.match(text.strip())
            return match[0] if match else None
        ref = text.removeprefix("ref:").strip(" \t\n")  # a name may end with a blank of Unicode
        if ".." in ref:
            return None
        values = (read_text(directory / ref) for directory in repository.directories)
        loose = next((value for value in values if value is not None), None)
        packed = (read_text(repository.common_dir / "packed-refs") or "").split("\n")
        rows = (line.partition(" ") for line in packed)
        text = next((oid for oid, _, name in rows if name == ref), "") if loose is None else loose
    return None


def judge_control(
    repository: ForeignRepository, private: Path, modules: Sequence[str] = ()
) -> Judgement:
    """Yield every object that a file names, and a leak for every file that must not exist.

    `private` is a git directory of ours; stores of submodules, in `modules`, are judged apart.
    """
    if repository.git_dir != repository.common_dir:
        common = repository.common_dir.resolve()
        yield leak("shared-store", f"this is a linked worktree: its objects are those of {common}")
    if is_symlink(repository.common_dir / "objects"):
        yield leak("shared-store", "objects is a symbolic link")
    if repository.lender is None:
        for line in repository.alternates:
            yield leak("alternate", f"objects are also read from {line}")
    else:
        yield from _judge_lender(repository.lender, private, modules)
    for directory in repository.directories:
        for file in walk(directory, skip=_JUDGED_APART):
            if not is_within(file.where, modules):
                yield from _judge(file, private)


def is_within(where: str, directories: Sequence[str]) -> bool:
    return any(where.startswith(f"{directory}/") for directory in directories)


def _judge_lender(git_dir: Path, private: Path, modules: Sequence[str]) -> Judgement:
    """Judge the sealed store that a repository borrows from; its objects count as its own."""
    lender = repository_at(git_dir)
    yield from (
        leak("alternate", f"the alternate {git_dir} reads objects from {line}")
        for line in lender.alternates
    )
    if lender.common_dir != git_dir or is_symlink(git_dir / "objects"):
        yield leak("alternate", f"the alternate {git_dir} has its objects elsewhere")
    if (head := resolve_head(lender)) is None:
        yield leak("alternate", f"the alternate {git_dir} has no HEAD")
    else:
        yield Named("alternate", f"HEAD of {git_dir}", head)
    for file in walk(git_dir, skip=_JUDGED_APART):
        if is_within(file.where, modules):
            continue
        if file.where not in _OF_STORE:
            yield leak("alternate", f"{file.where} of the alternate is in no sealed store")
        for judged in _judge(file, private):
            if isinstance(judged, Named):
                yield judged._replace(where=f"{judged.where} of the alternate")
            else:
                yield leak(judged.kind, f"the alternate: {judged.detail}")


# gzip, bzip2, xz, zip, Zstandard
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"PK\3\4", b"\x28\xb5\x2f\xfd")


def _judge(file: ForeignFile, private: Path) -> Judgement:
    where = file.where
    if file.kind == "unreadable":
        yield leak("unreadable", f"{where} cannot be read")
    elif file.kind != "file":
        yield leak("stray-file", f"{where} is a symbolic link, or not a regular file")
    elif form := next((form for pattern, form in _FORMS if pattern.fullmatch(where)), None):
        content = read_bytes(file.path)
        if content is None:
            yield leak("unreadable", f"{where} cannot be read, or is too large")
        else:
            yield from form(where, content, private)
    elif kind := next(
        (kind for prefix, kind in _KINDS.items() if f"{where}/".startswith(f"{prefix}/")), None
    ):
        yield leak(kind, f"{where} exists")
    # an archive, or named objects, tell more than the file's name
    elif _starts_with(file, *PACKS, *_COMPRESSED):
        yield leak("stray-file", f"{where} is a pack, a bundle or an archive")
    elif named := sorted(set(_OID.findall(read_text(file.path) or "")) - {_ZERO}):
        fact = f"is not part of a sealed repository, and names {', '.join(named[:5])}"
        yield leak("pseudo-ref", f"{where} {fact}")
    else:
        yield leak("stray-file", f"{where} is not part of a sealed repository")


def _starts_with(file: ForeignFile, *marks: bytes) -> bool:
    return (read_bytes(file.path, start=16) or b"").startswith(marks)


def _lines(content: bytes) -> list[str]:
    """Return the lines as git reads them: U+2028, say, may be in a name."""
    return decode_name(content).removesuffix("\n").split("\n") if content else []


_ONE_ID = re.compile(r"[0-9a-f]{40}\n?")
_SYMREF = re.compile(r"ref: refs/[^\x00-\x20\x7f]+\n?")


def _ref(where: str, content: bytes, _: Path) -> Judgement:
    """HEAD, ORIG_HEAD or a loose ref: one id, or the name of another ref."""
    text, kind = decode_name(content), _ref_kind(where)
    if _ONE_ID.fullmatch(text):
        if where != "HEAD":  # HEAD is judged by `resolve_head`
            yield Named(kind, where, text[:40])
    elif not _SYMREF.fullmatch(text):
        kind = "head" if where == "HEAD" else kind
        yield leak(kind, f"{where} is neither an object id nor the name of a ref")


def _ref_kind(where: str) -> str:
    if where.startswith("refs/replace/"):
        return "replace-ref"
    return {"refs/stash": "stash", "ORIG_HEAD": "pseudo-ref"}.get(where, "ref")


# git ends this line with a blank
_PACKED_HEADER = re.compile(r"# pack-refs with:( peeled| fully-peeled| sorted)* ?")
_PACKED_REF = re.compile(r"([0-9a-f]{40}) (refs/[^\x00-\x20\x7f]+)|\^([0-9a-f]{40})")


def _packed_refs(where: str, content: bytes, _: Path) -> Judgement:
    ref = where
    for number, line in enumerate(_lines(content)):
        match = _PACKED_REF.fullmatch(line)
        if match:
            ref = match[2] or ref
            yield Named(_ref_kind(ref), ref, match[1] or match[3])
        elif number or not _PACKED_HEADER.fullmatch(line):
            yield leak("ref", f"line {number + 1} of {where} is not a ref")


_REFLOG = re.compile(
    r"([0-9a-f]{40}) ([0-9a-f]{40}) [^\n<>]{0,200}<[^\n<>]{0,200}> \d{1,12} [+-]\d{4}"
    r"(\t[^\n]{0,200})?"
)


def _reflog(where: str, content: bytes, _: Path) -> Judgement:
    for line in _lines(content):
        match = _REFLOG.fullmatch(line)
        oids = match.group(1, 2) if match else _OID.findall(line)
        yield from (Named("reflog", where, oid) for oid in oids if oid != _ZERO)
        if not match:
            yield leak("reflog", f"{where} has a line that git does not write")


def _index(where: str, content: bytes, _: Path) -> Judgement:
    try:
        index = read_index(content)
    except ValueError as error:
        yield leak("index", f"{where} is not a valid index: {error}")
        return
    yield from (Named("index", where, oid.hex()) for oid in sorted(index.objects))
    for path, oid in index.gitlinks.items():
        yield Named("gitlink", decode_name(path), oid.hex())


def _template(where: str, content: bytes, _: Path) -> Judgement:
    """A file that `git init` copies: empty, or the same as in this host's git."""
    if content.strip() and content != read_bytes(_TEMPLATES / where):
        yield leak("stray-file", f"{where} is not the one that git installs")


# with values: what `git init` writes, what mirrord writes, and the identity of the committer
_SETTING = re.compile(
    r"core\.repositoryformatversion\n0"
    r"|core\.(?:filemode|bare|ignorecase|symlinks|precomposeunicode|trustctime)\n(?:true|false)"
    r"|core\.logallrefupdates\n(?:true|false|always)|core\.checkstat\n(?:default|minimal)"
    r"|filter\.lfs\.(?:clean|smudge|process)\n|filter\.lfs\.required\nfalse"
    r"|filter\.lfs\.clean\n"
    + re.escape(FILTER["clean"])
    + r"|filter\.lfs\.smudge\n"
    + re.escape(FILTER["smudge"])
    + r"|gc\.auto\n\d{1,6}|user\.(?:name|email)\n[^\n]{0,100}"
)


def _config(where: str, content: bytes, private: Path) -> Judgement:
    # -z: a value may have line feeds
    command = ("config", "--file=-", "--no-includes", "--list", "-z")
    try:
        listed = run_git_sync(*command, stdin=content, git_dir=private, doing=f"read {where}")
    except (CorruptObjectError, GitFailedError) as error:
        yield leak("unreadable", error.message)
        return
    unknown = set[str]()
    for row in filter(None, decode_name(listed.stdout).split("\0")):
        key, _, value = row.partition("\n")
        if not _SETTING.fullmatch(f"{key}\n{value}"):
            unknown.add(key)
    for key in sorted(unknown):
        kinds = (kind for prefix, kind in _SETTING_KINDS.items() if key.startswith(prefix))
        yield leak(next(kinds, "configuration"), f"configured: {shown(key)}")
    if not unknown and re.search(rb"[#;]", content):
        yield leak("configuration", f"{where} has comments, which may contain anything")


_FORMS: tuple[tuple[re.Pattern[str], Callable[[str, bytes, Path], Judgement]], ...] = (
    (re.compile(r"HEAD|ORIG_HEAD|refs/.+"), _ref),
    (re.compile(r"packed-refs"), _packed_refs),
    (re.compile(r"logs/.+"), _reflog),
    (re.compile(r"index"), _index),
    (re.compile(r"config"), _config),
    (re.compile(r"description|info/exclude|hooks/[a-z-]+\.sample"), _template),
)


def judge_work_tree(
    repository: ForeignRepository, modules: Sequence[str] = ()
) -> Iterator[SealLeak]:
    """Find other repositories, bundles and packs among untracked files, except in `modules`.

    Other content of untracked files is not judged.
    """
    if repository.work_tree is None:
        return
    try:
        tracked = read_index(read_bytes(repository.git_dir / "index") or b"").paths
    # the index is a leak then, and no file of the tree is excused by it
    except ValueError:
        tracked = set()
    for file in walk(repository.work_tree, skip=frozenset({".git"})):
        name = file.path.name
        if file.where == ".git" or os.fsencode(file.where) in tracked:
            continue
        if is_within(file.where, modules):
            continue
        where = f"{shown(file.where)} of the working tree"
        if file.kind == "unreadable":
            yield leak("unreadable", f"{where} cannot be read")
        elif name == ".git" or (name == "HEAD" and is_dir(file.path.parent / "objects")):
            yield leak("nested-repository", f"{where} belongs to another repository")
        elif file.kind == "file" and _starts_with(file, *PACKS):
            yield leak("stray-file", f"{where} is a pack or a bundle")
