"""HEAD, refs and configuration of a mirror, read from their files and compared with its history.

Only mirrord writes these files, and each transaction that moves a ref records that in the ref
history. So any difference was made by something else, and so was a history without the record that
the catalog knows. A tip that upstream left has a kept ref. Reads only, in a worker.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CorruptObjectError, GitFailedError
from ..git.batch import BatchObject
from ..host.files import read_plain
from ..mirrors.history import NOTHING_RECORDED, RecordedRefs, blobs_of, parse_lines, parse_record
from ..mirrors.pinrefs import is_pin
from ..mirrors.refs import JOURNAL, followed_refs
from ..mirrors.repository import HISTORY, INCOMING, KEPT, OURS, PINS, changed_settings
from ..model import FindingKind
from ..presence import exists
from ..quoting import decode_name, encode_name, quote_name
from .defects import BadFile, Defect, FileKind
from .graph import Graph, ancestors, read_graph
from .layout import no_directory, no_file, sorted_entries
from .reading import look_up, object_kinds, read_objects, run_git

_VALUE = re.compile(r"([0-9a-f]{40})\n?")
# \S would refuse blanks of Unicode, which git allows in names
_NAME = r"(refs/[^\x00-\x20\x7f]+)"
_SYMBOLIC = re.compile(rf"ref: {_NAME}\n?")
_PACKED = re.compile(rf"([0-9a-f]{{40}}) {_NAME}")
_PEELED = re.compile(r"\^([0-9a-f]{40})")
_REPLACE = "refs/replace/"


@dataclass(slots=True)
class RefFiles:
    """HEAD and refs as read. `head` is the ref that HEAD names, `refs` are those that look right.

    `astray` are the values of wrong refs, so that nothing is lost when those are corrected.
    `peeled` are objects with what packed-refs says their tag leads to, None where it says no tag.
    """

    head: str | None = None
    refs: dict[str, str] = field(default_factory=dict)
    astray: dict[str, str] = field(default_factory=dict)
    peeled: list[tuple[str, str | None]] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)

    @property
    def newest_record(self) -> Collection[str]:
        return blobs_of(self.refs[HISTORY]) if HISTORY in self.refs else ()

    def report(self, path: str, kind: FileKind, reason: str) -> None:
        self.bad.append(BadFile(path, kind, reason))


def read_ref_files(git_dir: Path) -> RefFiles:
    """Read HEAD, refs and configuration; bad files twice, because refs may move meanwhile."""
    files = _read(git_dir)
    if files.bad:
        first, files = files, _read(git_dir)
        files.bad = [bad for bad in files.bad if bad in first.bad]
    return files


def _read(git_dir: Path) -> RefFiles:
    # not by git, which refuses a repository without HEAD, and follows planted files
    files = RefFiles()
    text = _text(git_dir, "HEAD", FileKind.HEAD, files)
    if symbolic := _SYMBOLIC.fullmatch(text or ""):
        files.head = symbolic[1]
    elif not files.bad:
        is_detached = text is not None and _VALUE.fullmatch(text)
        reason = "it names a commit, not a branch" if is_detached else "it names no ref"
        files.report("HEAD", FileKind.HEAD, "it is lost" if text is None else reason)
    loose = dict(_loose_refs(git_dir, files))  # first, because packing moves refs the other way
    files.refs = {**dict(_packed_refs(git_dir, files)), **loose}
    for bad in files.bad:
        files.refs.pop(bad.path, None)  # the packed value of that ref is older
    _judge_private(files)
    # a file where other refs need a directory
    directories = {ref.rpartition("/")[0] for ref in files.refs}
    needed = {str(above) for path in directories for above in (Path(path), *Path(path).parents)}
    needed |= {"refs/heads", "refs/tags", *(ours.rstrip("/") for ours in (OURS, PINS, KEPT))}
    for ref in sorted(loose.keys() & needed):
        files.astray[ref] = files.refs.pop(ref, loose[ref])
        files.report(ref, FileKind.REF, "it is a file, where refs need a directory")
    if wrong := no_file(git_dir / "config"):
        files.report("config", FileKind.LAYOUT, wrong)
    elif changed := changed_settings(git_dir / "config"):
        files.report("config", FileKind.CONFIG, changed)
    files.bad.sort()
    return files


def read_packed(git_dir: Path) -> dict[str, str]:
    """Read the valid lines of `packed-refs`."""
    return dict(_packed_refs(git_dir, RefFiles()))


def oid_in_name(ref: str) -> str | None:
    """Return the object that a pin or a kept ref must name."""
    oid = ref.rpartition("/")[2]
    return oid if _VALUE.fullmatch(oid) and (ref == f"{KEPT}{oid}" or is_pin(ref)) else None


def _text(git_dir: Path, name: str, kind: FileKind, files: RefFiles) -> str | None:
    """Read a file; None where it is missing, or was reported as bad."""
    wrong = no_file(git_dir / name)
    try:
        if wrong is None:
            return decode_name(read_plain(git_dir / name))
        kind = FileKind.LAYOUT if kind is not FileKind.REF else kind
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (PermissionError, IsADirectoryError) as error:
        wrong = f"it cannot be read: {error.strerror}"
    files.report(name, kind, wrong)
    return None


def _loose_refs(
    git_dir: Path, files: RefFiles, directory: str = "refs"
) -> Iterator[tuple[str, str]]:
    if directory == "refs" and (wrong := no_directory(git_dir / directory)):
        files.report(directory, FileKind.LAYOUT, wrong)
        return
    for entry in sorted_entries(git_dir / directory):
        ref = f"{directory}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _loose_refs(git_dir, files, ref)
            continue
        # git writes a ref beside itself as NAME.lock, and allows no ref of such a name
        text = None if ref.endswith(".lock") else _text(git_dir, ref, FileKind.REF, files)
        if text is None:
            continue
        value = _VALUE.fullmatch(text)
        if ref.startswith(_REPLACE):
            files.report(ref, FileKind.PLANTED, "it gives an object another's content")
        # git calls a loose ref of zeros broken: no object has that id
        elif value and value[1] != "0" * 40:
            yield ref, value[1]
        elif _SYMBOLIC.fullmatch(text):
            files.report(ref, FileKind.REF, "it is symbolic")
        else:
            reason = "it does not hold an object id" if text else "it is empty"
            files.report(ref, FileKind.REF, reason)


def _packed_refs(git_dir: Path, files: RefFiles) -> Iterator[tuple[str, str]]:
    text = _text(git_dir, "packed-refs", FileKind.PACKED_REFS, files)
    if text is None:
        return
    lines = text.split("\n")
    wrong = ["its end is missing"] if lines.pop() else []
    before, last = b"", ""
    header = lines[0].split() if lines else []
    for number, line in enumerate(lines, 1):
        packed = _PACKED.fullmatch(line)
        if packed and packed[2].startswith(_REPLACE):
            reason = f"line {number} gives an object another's content"
            files.report("packed-refs", FileKind.PACKED_REFS, reason)
        elif packed:
            if (name := encode_name(packed[2])) <= before:
                wrong.append(f"line {number} is out of order")
            before, last = name, packed[1]
            is_peeled = "fully-peeled" in header or (
                "peeled" in header and packed[2].startswith("refs/tags/")
            )
            if is_peeled:  # git (2.39) then takes it for no tag, unless a peeled line follows
                files.peeled.append((last, None))
            yield packed[2], packed[1]
        elif peeled := _PEELED.fullmatch(line):
            if files.peeled and files.peeled[-1] == (last, None):
                files.peeled.pop()
            files.peeled.append((last, peeled[1]))
        elif number > 1 or not line.startswith("# pack-refs"):
            wrong.append(f"line {number} is not a ref")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        files.report("packed-refs", FileKind.PACKED_REFS, wrong[0] + more)


def _judge_private(files: RefFiles) -> None:
    """Report private refs that are no pin, kept ref, mark of a fetch or history, or are wrong."""
    for ref, oid in [item for item in files.refs.items() if item[0].startswith(OURS)]:
        is_named = ref in {HISTORY, f"{KEPT}{oid}", f"{INCOMING}{oid}"}
        if is_named or (is_pin(ref) and ref.endswith(oid)):
            continue
        files.astray[ref] = files.refs.pop(ref)
        if ref.startswith(INCOMING) or not oid_in_name(ref):
            files.report(ref, FileKind.PLANTED, "mirrord makes no such ref")
        else:
            files.report(ref, FileKind.REF, f"it names {oid}, not the object in its name")


def wrongly_peeled(files: RefFiles, objects: Mapping[str, BatchObject]) -> list[BadFile]:
    """Compare what packed-refs says about tags with `objects`, those that `peeled_names` names.

    git (2.39) believes it: an upstream's tag would be served as another commit's.
    """
    for oid, peeled in files.peeled:
        target = objects.get(f"{oid}^{{}}")
        if target and peeled != (target.oid if target.oid != oid else None):
            fact = f"it says that {oid} leads to {peeled or 'nothing'}, and not to {target.oid}"
            return [BadFile("packed-refs", FileKind.PACKED_REFS, fact)]
    return []


def peeled_names(files: RefFiles) -> Iterator[str]:
    """Name the objects that `wrongly_peeled` compares."""
    return (f"{oid}^{{}}" for oid, _ in files.peeled)


# -- refs compared with the history ----------------------------------------------------------------


def wrong_refs(
    repository: Path,
    git_dir: Path,
    files: RefFiles,
    objects: Mapping[str, BatchObject],
    expected: str | None,
) -> dict[str, Defect]:
    """Find defects by ref. `repository` has the objects of `git_dir`, readable for git.

    `objects` are those that refs name, with the bytes of the newest record. `expected` is a record
    that the history must have.
    """
    defects = _wrong_refs(repository, files, objects, expected)
    if not defects:
        return {}
    ends = time.monotonic() + 10  # longer than any transaction; a crash may have left a journal
    while exists(git_dir / JOURNAL) and time.monotonic() < ends:  # refs are moving now
        time.sleep(0.1)
    now = read_ref_files(git_dir)
    objects = look_up(repository, now.refs.values(), read=now.newest_record)
    again = _wrong_refs(repository, now, objects, expected)
    defects = {ref: defect for ref, defect in defects.items() if again.get(ref) == defect}
    reported: dict[str, Defect] = {}
    for kind in dict.fromkeys(defect.kind for defect in defects.values()):
        refs = sorted(ref for ref, defect in defects.items() if defect.kind is kind)
        reported |= {ref: defects[ref] for ref in refs[:10]}
        if more := refs[10:]:
            reported[f"{quote_name(more[0])} and {len(more) - 1} more refs"] = defects[more[0]]
    return reported


def _wrong_refs(
    repository: Path, files: RefFiles, objects: Mapping[str, BatchObject], expected: str | None
) -> dict[str, Defect]:
    # the finding of a pin without an object is about the commit
    dangling = [ref for ref, oid in files.refs.items() if oid not in objects and PINS not in ref]
    defects = dict.fromkeys(dangling, Defect(FindingKind.REF, "it names a missing object"))
    broken = {bad.path for bad in files.bad}
    tip = files.refs.get(HISTORY)
    if tip is None:
        if (files.refs or expected) and HISTORY not in broken:
            defects[HISTORY] = Defect(FindingKind.REF_LOST, "it is gone")
        return defects
    record = [objects[name] for name in blobs_of(tip) if name in objects]
    if [blob.kind for blob in record] != ["blob", "blob"]:
        return {HISTORY: Defect(FindingKind.REF_MOVED, "it does not name a record")} | defects
    past = record_ids(repository, tip) if expected not in {None, tip} else None
    if past is not None and expected not in past:
        defects[HISTORY] = Defect(FindingKind.REF_MOVED, f"it does not lead to record {expected}")
    recorded, head, *_ = parse_record(*record)
    for ref, oid in recorded.items():
        if ref in broken or ref in defects:
            continue
        value = files.refs.get(ref)
        if value is None:
            defects[ref] = Defect(FindingKind.REF_LOST, "it is gone, and the ref history has it")
        elif value != oid:
            reason = f"it names {value}, and {oid} in the ref history"
            defects[ref] = Defect(FindingKind.REF_MOVED, reason)
    if head in recorded and files.head != head and "HEAD" not in broken:
        reason = f"it names {files.head}, and {head} in the ref history"
        defects["HEAD"] = Defect(FindingKind.HEAD, reason)
    return defects


def is_record(repository: Path, oid: str) -> bool:
    """True if an object has the form of a record."""
    return len(look_up(repository, blobs_of(oid))) == len(blobs_of(oid))


def record_ids(repository: Path, tip: str) -> set[str] | None:
    """Return the records of the history up to `tip`; None where some are missing."""
    try:
        return set(run_git(repository, "read the ref history", "rev-list", tip, "--").lines)
    except (CorruptObjectError, GitFailedError):
        return None


def read_record(repository: Path, record: str) -> RecordedRefs:
    """Read a record of the ref history; an empty one where it is unreadable."""
    blobs = look_up(repository, (), read=blobs_of(record)).values()
    return parse_record(*blobs) if len(blobs) == 2 else NOTHING_RECORDED


def recorded_tips(repository: Path, tip: str) -> set[str]:
    """Return all tips of upstream's refs in the readable records up to `tip`."""
    try:
        walk = ("rev-list", "--first-parent", tip)
        records = run_git(repository, "walk the ref history", *walk).lines
    except (CorruptObjectError, GitFailedError):
        records = [tip]
    return {oid for lists in read_lists(repository, records).values() for oid in lists.values()}


def read_lists(repository: Path, records: Iterable[str]) -> dict[str, dict[str, str]]:
    """Read upstream's refs from the blobs of records, by blob, because records share blobs."""
    lists = look_up(repository, [name for record in records for name in blobs_of(record)])
    blobs = {blob.oid for blob in lists.values() if blob.kind == "blob"}
    read = read_objects(repository, sorted(blobs), doing="read ref records")
    return {blob.oid: followed_refs(parse_lines(blob.data)[0]) for blob in read if blob.exists}


def unkept(
    repository: Path, tips: Iterable[str], refs: Mapping[str, str], graph: Graph | None = None
) -> dict[str, str]:
    """Make kept refs for those of `tips` that no ref but pins reaches.

    Empty while an object is missing or damaged, because ancestry is unknown then.
    """
    lasting = {oid for ref, oid in refs.items() if not ref.startswith(PINS)}
    past = set(tips) - lasting
    if not past:
        return {}
    ends = look_up(repository, [f"{oid}^{{}}" for oid in lasting])  # through tags
    now = [end.oid for end in ends.values() if end.kind == "commit"]
    there = {oid for oid, kind in object_kinds(repository, past).items() if kind == "commit"}
    if graph is None or not there <= graph.keys():
        graph = read_graph(repository, [*now, *there])
    reached = ancestors(graph, now)
    if reached - graph.keys() or len(ends) < len(lasting):
        return {}
    lost = there - reached
    inner = {parent for oid in ancestors(graph, lost) for parent in graph.get(oid, ())}
    return {f"{KEPT}{oid}": oid for oid in sorted(lost - inner)}
