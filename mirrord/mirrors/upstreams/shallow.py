"""Commits of a shallow upstream, which lack their parents.

A mirror has whole histories only. In place of such a commit it keeps one with the same tree, author
and message, without parents, and with a header that names the commit of upstream. Squashed
checkouts of the two are equal to the byte.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import replace

from ...git import WITHOUT_PARENTS
from ...model import CommitId
from ...protocol import RefFault
from ..repository import Repository
from .fetching import Fetcher
from .upstream import parse_upstream


def is_shallow(reason: str) -> bool:
    """True if a fetch failed for the reason that upstream is shallow."""
    return "upstream is shallow: " in reason


def find_parentless(faults: Iterable[RefFault], commitish: str) -> CommitId | None:
    """Return what a mirror has in place of a commit that a ref of upstream names."""
    for fault in faults:
        ref = fault.ref
        names = {ref, *(ref.removeprefix(it) for it in ("refs/", "refs/heads/", "refs/tags/"))}
        if fault.parentless and commitish in {*names, fault.commit}:
            return CommitId(fault.parentless)
    return None


async def fetch_parentless(fetcher: Fetcher, oids: Collection[str]) -> dict[str, CommitId]:
    """Fetch commits without their parents; return, for each, what the mirror has in its place."""
    if not oids:
        return {}
    written: dict[str, CommitId] = {}
    async with fetcher.quarantine.directory("shallow") as directory:
        git, name = fetcher.repository.git, fetcher.repository.name
        scratch = Repository(git, name, directory / "repository")
        await scratch.create()
        asking, url = replace(fetcher, repository=scratch), fetcher.upstream.remote.url
        env = {"GIT_SHALLOW_FILE": f"{directory}/shallow"}
        await asking.fetch_into(scratch.objects, sorted(oids), url, (), ("--depth=1",), env)
        for oid in oids:
            doing = f"copy commit {oid} of upstream {fetcher.upstream.shown}"
            commit = await scratch.run("cat-file", "commit", oid, doing=doing)  # a tag's, too
            words = ("hash-object", "-t", "commit", "-w", "--stdin")
            body = _without_parents(commit.stdout)
            result = await scratch.run(*words, stdin=body, doing=doing)
            written[oid] = CommitId(result.lines[0])
        copying = replace(fetcher, upstream=parse_upstream(str(scratch.path)))
        failed = await copying.fetch(sorted(set(written.values())))
    return {oid: commit for oid, commit in written.items() if commit not in failed}


_COPIED = (b"tree ", b"author ", b"committer ", b"encoding ")


def _without_parents(commit: bytes) -> bytes:
    """Return a commit without parents, and without the signature, which would not fit it."""
    head, _, message = commit.partition(b"\n\n")
    lines = [line for line in head.split(b"\n") if line.startswith(_COPIED)]
    whole = b"commit %d\0%s" % (len(commit), commit)
    name = hashlib.sha1(whole, usedforsecurity=False).hexdigest()
    header = WITHOUT_PARENTS + name.encode()
    return b"\n".join([*lines, header]) + b"\n\n" + message
