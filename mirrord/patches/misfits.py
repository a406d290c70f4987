"""Names the hunk for which a patch is refused; git names a line of the file, or of the patch."""

import re
from bisect import bisect_left
from itertools import pairwise

from ..errors import MirrordError
from ..git.modes import DIRECTORY, SUBMODULE
from ..host.files import shown_path
from .fit import UNTRACKED, Splice, Tree
from .parse import LIMIT_BYTES, FilePatch, NeedsGitError, parse
from .repairs import HUNK, to_lf, unwrap
from .splicing import MisfitError, splice, splice_fuzzily

# git 2.39 says `line N`; later ones name the input, here their standard one
_CORRUPT = re.compile(r"corrupt patch at (?:line |<stdin>:)(\d+)")


def with_hunk(
    error: MirrordError, tree: Tree, patch: bytes, *, reverse: bool, is_tolerant: bool
) -> MirrordError:
    """Return a refusal with the first hunk that fits nowhere or cannot be read, if it is a hunk."""
    if len(patch) > LIMIT_BYTES:
        return error
    how: Splice = splice_fuzzily if is_tolerant else splice
    fact = None
    try:
        for file in parse(unwrap(to_lf(patch)) if is_tolerant else patch):
            fact = fact or _misfit_of(tree, file.reversed() if reverse else file, how)
    except NeedsGitError:
        if corrupt := _CORRUPT.search(error.message):
            fact = _hunk_at(patch, int(corrupt[1]))
    if fact is None:
        return error
    return type(error)(f"{error.message}; {fact}", hint=error.hint, **error.facts)


def _misfit_of(tree: Tree, file: FilePatch, how: Splice) -> str | None:
    before = tree.read(file.old) if file.old is not None else None
    if before is None or before.mode in (DIRECTORY, UNTRACKED, SUBMODULE):
        return None  # git says so itself
    data = before.data

    def is_refused(count: int) -> bool:
        try:
            how(data, file.hunks[:count])
        except MisfitError:
            return True
        return False

    # more hunks never mend a refusal, so the first that is refused is found by halving
    index = bisect_left(range(1, len(file.hunks) + 1), True, key=is_refused)
    if index == len(file.hunks):
        return None
    hunk = file.hunks[index]
    numbers = f"-{hunk.old_start},{hunk.old_count} +{hunk.new_start},{hunk.new_count}"
    return f"hunk {index + 1} of {shown_path(file.old or b'')} (@@ {numbers} @@) fits nowhere"


def _hunk_at(patch: bytes, line: int) -> str | None:
    """Return the hunk that a line of a patch belongs to, by its number in its file."""
    name, number, header = b"", 0, b""
    for text, following in pairwise([*patch.split(b"\n")[:line], b""]):
        if text.startswith(b"diff --git ") or following.startswith(b"+++ "):
            number = 0
        if text.startswith((b"--- ", b"+++ ")) and number == 0 and b"/dev/null" not in text:
            name = text[4:].split(b"\t")[0].removeprefix(b"a/").removeprefix(b"b/")
        if match := HUNK.match(text):
            number, header = number + 1, text[: match.start(5)]
    if not number:
        return None
    lines = f"hunk {number} of {shown_path(name)} ({header.decode()})"
    return f"{lines} has other lines than it says"
