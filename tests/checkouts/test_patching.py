"""Diff, apply and restore, with real git as the oracle: what `git add --all` makes of the dirty tree."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import NAME, ROOT_PEER, USER_PEER, Service, as_user, run_as, running_service
from gitrepos import Upstream, git

from mirrord.errors import (
    AccessError,
    CheckoutBusyError,
    CommitNotFoundError,
    InvalidPatchError,
    InvalidRequestError,
    MirrordError,
    PatchConflictError,
    PathNotFoundError,
    TooLargeError,
)
from mirrord.model import ApplyStrategy, CommitId, DiffFormat, FoundStrategy, View
from mirrord.patches.apply import apply as apply_in_worker
from mirrord.patches.apply import restore as restore_in_worker
from mirrord.patches.worktree import PatchJob
from mirrord.protocol import ApplyAnswer, Checkout, ResetCheckout, RestorePaths, StartCheckout

pytestmark = pytest.mark.root

CHANGES = {
    "tracked": "echo x >>README; printf 'print(9)\\n' >src/main.py",
    "untracked": "mkdir -p new/dir; echo 1 >new/dir/f; echo 2 >top",
    "ignored": "mkdir build; echo 1 >build/o; echo 2 >x.o; echo 3 >keep.o; echo 4 >src/y.o",
    "a new .gitignore": "echo '*.log' >src/.gitignore; echo 1 >src/a.log; echo 2 >b.log",
    "binary": "head -c 3000 /dev/urandom >data.bin; head -c 99 /dev/urandom >new.bin",
    "modes": "chmod 755 README; chmod 644 run.sh",
    "renames": "git mv src/main.py src/renamed.py; mv docs/page.txt moved.txt",
    "links": "ln -sf README link; ln -s /etc/passwd out; rm README; ln -s run.sh README",
    "deletions": "rm README; rm -r src docs",
    "file and directory": "rm README; mkdir README; echo 1 >README/x; rm -r docs; echo 1 >docs; rm link; mkdir link; : >link/y",
    "line ends": "printf 'a\\r\\nc\\r\\n' >win.txt; printf 'x\\r\\ny\\r\\n' >auto.txt; printf 'q\\r\\n' >crlf.txt",
    "odd names": r"""printf 1 >"$(printf 'n\377')"; printf 2 >"$(printf 'a\nb')"; echo 3 >'sp "q"'; rm caf*; echo 4 >:colon""",
    "empty files": ": >blank; mkdir d; : >d/blank; echo x >empty",
    "commits and staged edits": "echo x >>README; git commit -qam x; echo 1 >s; git add s; git rm -q --cached run.sh",
    "nothing": "touch README; mkdir nothing",
    "a submodule deleted": "rm -rf vendor",
}


@pytest.fixture(scope="module")
def service(rich: Upstream) -> Iterator[Service]:
    with running_service(rich) as running:
        (running.state / "space").mkdir(mode=0o777)
        base, gold = rich.git("rev-parse", "v2"), rich.git("rev-parse", "v3")
        running.call(running.mirrors.pin, NAME, [CommitId(gold)], owner="person/0", reason="gold")
        running.import_instances(
            [{"instance_id": "psf__requests-1", "repo": "psf/requests", "base_commit": base, "problem_statement": "it breaks",
              "patch": rich.git("diff", "v2", "v3") + "\n", "test_patch": "", "version": "1", "FAIL_TO_PASS": "[]",
              "PASS_TO_PASS": "[]", "created_at": "2020-01-01", "hints_text": ""}]
        )  # fmt: skip
        yield running


@pytest.fixture
def checkout(service: Service) -> Iterator[Checkout]:
    made = service.call(
        service.checkouts.checkout, StartCheckout(instance="psf__requests@v2"), USER_PEER
    )
    yield made
    service.call(service.checkouts.release, made.id, USER_PEER)


@pytest.fixture
def grading(service: Service) -> Iterator[Checkout]:
    request = StartCheckout(instance="psf__requests-1", view=View.GRADER)
    made = service.call(service.checkouts.checkout, request, ROOT_PEER)
    yield made
    service.call(service.checkouts.release, made.id, ROOT_PEER)


def tree_of_patch(rich: Upstream, tmp_path: Path, patch: bytes) -> str:
    """git's tree of the base commit with the patch applied."""
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-checkout", rich.url, str(clone))
    git(clone, "checkout", "--quiet", "--detach", "v2")
    if patch:
        git(clone, "apply", "--index", "-", stdin=patch)
    return git(clone, "write-tree")


def apply(
    service: Service, checkout: Checkout, patch: bytes, peer: object = USER_PEER, **choices: object
) -> ApplyAnswer:
    return service.call(service.checkouts.apply, checkout.id, peer, patch=patch, **choices)


@pytest.mark.parametrize("what", CHANGES)
def test_the_diff_gives_the_tree_that_git_add_would(
    service: Service, checkout: Checkout, rich: Upstream, tmp_path: Path, what: str
) -> None:
    """`git apply --index` of the diff on the base commit gives the tree of `git add --all` in the dirty checkout."""
    tree = Path(checkout.path)
    run_as(USER_PEER.uid, CHANGES[what], tree, service)
    patch = service.diff(checkout)
    as_user(tree, "add", "--all")
    assert tree_of_patch(rich, tmp_path, patch) == as_user(tree, "write-tree")


def test_the_diff_has_what_another_user_made_again(service: Service, checkout: Checkout) -> None:
    """A tool of root removes a directory of the checkout and writes it again."""
    tree = Path(checkout.path)
    shutil.rmtree(tree / "src")
    (tree / "src/deep").mkdir(parents=True)
    (tree / "src/deep/new.py").write_text("1\n")
    (tree / "src/main.py").write_text("2\n")
    patch = service.diff(checkout)
    assert b"+++ b/src/deep/new.py\n" in patch
    assert b"+++ b/src/main.py\n" in patch


def test_the_diff_has_the_files_of_a_nested_repository(
    service: Service, checkout: Checkout, rich: Upstream, tmp_path: Path
) -> None:
    """As files, without their history."""
    script = "git init -q nested; cd nested; echo 1 >f; git add f; git commit -qm n"
    run_as(USER_PEER.uid, script, Path(checkout.path), service)
    patch = service.diff(checkout)
    assert b"nested/f" in patch
    assert b"nested/.git" not in patch


def test_the_diff_has_what_is_below_a_submodule(
    service: Service, checkout: Checkout, rich: Upstream, tmp_path: Path
) -> None:
    """By its path in the tree, where `git apply` and an apply take it; and says so, as of a pipe."""
    made = checkout
    script = "mkdir vendor/sub/d; echo 1 >vendor/sub/d/f; echo 2 >>README; mkfifo pipe d.o; mkdir d; mkfifo d/p"
    run_as(USER_PEER.uid, script, Path(made.path), service)
    answer = service.call(service.checkouts.diff, made.id, USER_PEER)
    assert answer.notes == (
        "no patch records pipes, sockets and devices: 'd/p', 'pipe'",
        "below submodule 'vendor/sub', by their paths in this tree: 'vendor/sub/d/f'",
    )
    assert isinstance(answer.content, bytes)
    assert b"+++ b/vendor/sub/d/f\n" in answer.content
    assert b"Subproject" not in answer.content
    forms = {
        form: bytes(service.call(service.checkouts.diff, made.id, USER_PEER, form).content).split()
        for form in (DiffFormat.STAT, DiffFormat.NAME_STATUS)
    }
    assert forms[DiffFormat.NAME_STATUS] == [b"M", b"README", b"A", b"vendor/sub/d/f"]
    assert (b"vendor/sub/d/f" in forms[DiffFormat.STAT], b"vendor/sub" in forms[DiffFormat.STAT]) == (True, False)  # fmt: skip
    git(tmp_path, "clone", "--quiet", "--no-checkout", rich.url, "clone")
    git(tmp_path / "clone", "checkout", "--quiet", "--detach", "v2")
    git(tmp_path / "clone", "apply", "-", stdin=answer.content)
    assert (tmp_path / "clone/vendor/sub/d/f").read_text() == "1\n"
    service.call(service.checkouts.reset, made.id, ResetCheckout(), USER_PEER)
    assert list((Path(made.path) / "vendor/sub").iterdir()) == []
    apply(service, made, answer.content)
    assert (Path(made.path) / "vendor/sub/d/f").read_text() == "1\n"


@pytest.mark.parametrize(
    ("what", "script"),
    {
        "pipes": "mkfifo pipe; rm README; mkfifo README",
        "files of mode 000": "echo 1 >new; chmod 000 new README; chmod 000 docs",
        "links to secrets": 'ln -s "$SPACE/../lease" secret; rm -r src; ln -s "$SPACE/.." src',
    }.items(),
)  # fmt: skip
def test_a_hostile_tree_cannot_hang_or_widen_a_diff(
    service: Service, checkout: Checkout, what: str, script: str
) -> None:
    """The daemon reads only regular files and link texts below the tree."""
    (service.state / "lease").write_text("SECRET")
    run_as(USER_PEER.uid, script, Path(checkout.path), service)
    assert b"SECRET" not in service.diff(checkout)


def test_a_huge_file_is_refused(service: Service, checkout: Checkout) -> None:
    """A sparse terabyte costs nothing but an error."""
    run_as(USER_PEER.uid, "truncate -s 1T huge", Path(checkout.path), service)
    with pytest.raises(TooLargeError):
        service.diff(checkout)


def test_a_tree_replaced_by_a_link_has_no_diff(service: Service, checkout: Checkout) -> None:
    """The link is not followed."""
    run_as(0, 'mv "$PWD" "$PWD.x"; ln -s /etc "$PWD"', Path(checkout.path), service)
    with pytest.raises(CheckoutBusyError):
        service.diff(checkout)


def test_apply_and_its_reverse(service: Service, checkout: Checkout, rich: Upstream) -> None:
    """A patch goes in as the owner's files, over changes elsewhere, and comes out again."""
    tree = Path(checkout.path)
    run_as(USER_PEER.uid, "echo mine >mine; echo y >>docs/page.txt", tree, service)
    patch = rich.git("diff", "--binary", "v2", "v3").encode()
    apply(service, checkout, patch)
    assert (tree / "docs/new3.txt").stat().st_uid == USER_PEER.uid
    assert as_user(tree, "diff", "--stat", "v2", "--", "README") != ""
    before = as_user(tree, "status", "--porcelain")
    assert "docs/page.txt" in before
    assert "src/deep" not in before
    apply(service, checkout, patch, reverse=True)
    assert as_user(tree, "status", "--porcelain").split() == ["M", "docs/page.txt", "??", "mine"]


def job_of(service: Service, checkout: Checkout) -> PatchJob:
    """Return the job of a worker for a checkout."""
    return PatchJob(
        Path(checkout.path), service.mirror, checkout.commit, checkout.tree,
        (USER_PEER.uid, USER_PEER.gid), service.state / "scratch",
    )  # fmt: skip


_started: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _started is not None and event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _started.append(str(arguments[0]))


sys.addaudithook(_watch)


@contextmanager
def started_processes() -> Iterator[list[str]]:
    """Collect the processes that this one starts inside."""
    global _started
    _started = []
    try:
        yield _started
    finally:
        _started = None


def test_a_plain_apply_and_a_restore_start_no_process(
    service: Service, checkout: Checkout, rich: Upstream
) -> None:
    """Text, modes, new and removed files, renames, links, and back; one git for a binary file."""
    tree = Path(checkout.path)
    run_as(USER_PEER.uid, "echo mine >mine; echo y >>docs/page.txt", tree, service)
    script = (
        "rm README; chmod 755 empty; ln -sf README link; echo 1 >src/new; mv run.sh src/run.sh;"
        " printf 'a\\r\\nc\\r\\n' >win.txt; git add --all"
    )
    run_as(USER_PEER.uid, script, tree, service)
    patch = as_user(tree, "diff", "--cached", "-M", "v2").encode() + b"\n"
    wanted = as_user(tree, "write-tree")
    as_user(tree, "reset", "--quiet", "--hard", "v2")
    job, exact, v3 = job_of(service, checkout), ApplyStrategy.EXACT, rich.git("rev-parse", "v3")
    with started_processes() as started:
        apply_in_worker(job, patch, False, exact)
        apply_in_worker(job, patch, True, exact)
        apply_in_worker(job, patch, False, exact)
        restore_in_worker(job, v3, [b"src/deep"])
    assert started == []
    as_user(tree, "add", "--all")
    assert as_user(tree, "write-tree") == wanted
    assert (tree / "win.txt").read_bytes() == b"a\r\nc\r\n"
    binary = "head -c 99 /dev/urandom >data.bin; git add --all"
    run_as(USER_PEER.uid, binary, tree, service)
    patch = as_user(tree, "diff", "--cached", "--binary", wanted).encode() + b"\n\n"
    as_user(tree, "reset", "--quiet", "--hard")
    with started_processes() as started:
        apply_in_worker(job, patch, False, exact)
    assert len(started) == 1


SPOILED: dict[str, tuple[Callable[[bytes], bytes], FoundStrategy]] = {
    "nothing": (lambda patch: patch, FoundStrategy.EXACT),
    "wrong counts": (lambda patch: re.sub(rb"@@ -\d,\d ", b"@@ -1,9 ", patch), FoundStrategy.COUNTS),
    "prose, and no modes": (
        lambda patch: (
            b"Like this: @@ -1 +1 @@\n```diff\n" + patch.replace(b"new file mode 100644\n", b"") + b"```\n"
        ),
        FoundStrategy.PROSE,
    ),
    "indented": (lambda patch: re.sub(rb"(?m)^", b"    ", patch), FoundStrategy.PROSE),
    "crlf": (lambda patch: patch.replace(b"\n", b"\r\n"), FoundStrategy.CRLF),
    "blanks": (lambda patch: patch.replace(b"-2\n", b"-2  \n", 1), FoundStrategy.BLANKS),
    "context": (lambda patch: patch.replace(b" 2\n 2\n", b" 2\n 7\n"), FoundStrategy.FUZZ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_tolerant_apply_takes_a_spoiled_patch_and_names_how(
    service: Service, grading: Checkout, rich: Upstream, what: str
) -> None:
    """With the tree of the patch as it was; an exact one refuses it, and changes nothing."""
    tree = Path(grading.path)
    (tree / "README").write_text("1\n2\n2\n2\n2\n2\n2\n")
    git(tree, "add", "--all")
    before = git(tree, "write-tree")
    (tree / "README").write_text("1\n2\n2\n3\n3\n2\n2\n")
    (tree / "new").write_text("new\n")
    git(tree, "add", "--all")
    patch, wanted = git(tree, "diff", "--cached", before).encode() + b"\n", git(tree, "write-tree")
    git(tree, "read-tree", "--reset", "-u", before)
    spoil, strategy = SPOILED[what]
    if strategy is not FoundStrategy.EXACT:
        with pytest.raises((PatchConflictError, InvalidPatchError)):
            apply(service, grading, spoil(patch), ROOT_PEER)
        assert git(tree, "status", "--porcelain") == "M  README"
    tolerant = ApplyStrategy.TOLERANT
    answer = apply(service, grading, spoil(patch), ROOT_PEER, strategy=tolerant)
    git(tree, "add", "--all")
    assert (git(tree, "write-tree"), answer.strategy) == (wanted, strategy)


def test_a_patch_of_the_base_commit_is_merged_with_what_changed_since(
    service: Service, checkout: Checkout
) -> None:
    """As `git apply --3way`; where both changed the same lines it is refused."""
    tree = Path(checkout.path)
    run_as(USER_PEER.uid, "seq 9 >new; sed -i 1s/2/mine/ README", tree, service)
    blob = as_user(tree, "rev-parse", "HEAD:README").encode()
    patch = b"diff --git a/README b/README\nindex %b..%b 100644\n" % (blob, b"1" * 40)
    patch += b"--- a/README\n+++ b/README\n@@ -1,5 +1,5 @@\n 2\n 2\n 2\n 2\n-2\n+theirs\n"
    with pytest.raises(PatchConflictError):
        apply(service, checkout, patch)
    answer = apply(service, checkout, patch, strategy=ApplyStrategy.TOLERANT)
    assert answer.strategy is FoundStrategy.THREE_WAY
    assert (tree / "README").read_text() == "mine\n2\n2\n2\ntheirs\n"
    run_as(USER_PEER.uid, "echo other >README", tree, service)
    with pytest.raises(PatchConflictError, match="README"):
        apply(service, checkout, patch, strategy=ApplyStrategy.TOLERANT)
    assert (tree / "README").read_text() == "other\n"


@pytest.mark.parametrize("strategy", ApplyStrategy)
def test_a_patch_reads_no_object_of_the_mirror(
    service: Service, checkout: Checkout, rich: Upstream, strategy: ApplyStrategy
) -> None:
    """The id of a later blob in a patch gives its content neither as a result nor as a merge side."""
    old, later = (rich.git("rev-parse", f"{tag}:README") for tag in ("v2", "v3"))
    head = f"diff --git a/README b/README\nindex {old}..{later} 100644\n"
    binary = head + "Binary files a/README and b/README differ\n"
    merge = f"diff --git a/README b/README\nindex {later}..{old} 100644\n--- a/README\n+++ b/README\n@@ -1,5 +1,5 @@\n"
    merge += " 3\n" * 4 + "-3\n+x\n"
    run_as(USER_PEER.uid, "echo 2 >README", Path(checkout.path), service)
    for patch in (binary, merge):
        with pytest.raises((PatchConflictError, InvalidPatchError)):
            apply(service, checkout, patch.encode(), strategy=strategy)
    assert (Path(checkout.path) / "README").read_text() == "2\n"


@pytest.mark.parametrize("strategy", ApplyStrategy)
def test_a_patch_leaves_other_files_alone(
    service: Service, checkout: Checkout, strategy: ApplyStrategy
) -> None:
    """A directory with more in it than the patch removes, a pipe, a file that git ignores, a submodule."""
    tree = Path(checkout.path)
    script = "echo 1 >docs/x.o; mkfifo pipe; echo 1 >y.o; rm -r vendor; mkdir -p vendor/sub; echo 1 >vendor/sub/f"
    run_as(USER_PEER.uid, script, tree, service)
    new = b"--- /dev/null\n+++ b/%b\n@@ -0,0 +1 @@\n+x\n"
    gone = b"".join(
        b"--- a/docs/%b\n+++ /dev/null\n@@ -1 +0,0 @@\n-%b\n" % names
        for names in ((b"page.txt", b"page"), (b"new2.txt", b"2"))
    )
    for patch in (gone + new % b"docs", new % b"pipe", new % b"y.o", new % b"README/x", new % b"vendor/sub/f"):  # fmt: skip
        with pytest.raises(PatchConflictError):
            apply(service, checkout, patch, strategy=strategy)
    assert (tree / "docs/x.o").read_text() == "1\n"
    assert (tree / "docs/page.txt").read_text() == "page\n"
    assert [path.name for path in (tree / "vendor/sub").iterdir()] == ["f"]
    apply(service, checkout, gone, strategy=strategy)
    assert [path.name for path in (tree / "docs").iterdir()] == ["x.o"]


def test_a_patch_may_change_the_rules_of_line_ends(service: Service, checkout: Checkout) -> None:
    """Files are written by the attributes that it leaves, and read by those before."""
    tree = Path(checkout.path)
    patch = (
        b"--- a/.gitattributes\n+++ b/.gitattributes\n@@ -1,2 +1,2 @@\n-win.txt text eol=crlf\n"
        b"+README text eol=crlf\n auto.txt text=auto\n"
        b"--- a/win.txt\n+++ b/win.txt\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
        b"--- a/README\n+++ b/README\n@@ -1,5 +1,6 @@\n+1\n 2\n 2\n 2\n 2\n 2\n"
    )
    apply(service, checkout, patch)
    assert (tree / "win.txt").read_bytes() == b"a\nc\n"
    assert (tree / "README").read_bytes() == b"1\r\n" + b"2\r\n" * 5


def test_a_link_without_a_target_is_refused(service: Service, checkout: Checkout) -> None:
    """git's index takes one; no file system does."""
    patch = b"diff --git a/link b/link\nindex 1..2 120000\n--- a/link\n+++ b/link\n@@ -1 +0,0 @@\n-docs/page.txt\n\\ No newline at end of file\n"
    with pytest.raises(InvalidPatchError, match="needs a target"):
        apply(service, checkout, patch)
    assert (Path(checkout.path) / "link").readlink() == Path("docs/page.txt")


def test_apply_keeps_line_ends(service: Service, checkout: Checkout) -> None:
    """A file with `eol=crlf` is patched as git patches it."""
    patch = b"--- a/win.txt\n+++ b/win.txt\n@@ -1,2 +1,2 @@\n a\n-b\n+c"
    apply(service, checkout, patch)
    assert (Path(checkout.path) / "win.txt").read_bytes() == b"a\r\nc\r\n"


@pytest.mark.parametrize(
    ("patch", "error"),
    [
        (b"--- a/README\n+++ b/README\n@@ -1 +1 @@\n-no such line\n+x\n", PatchConflictError),
        (b"--- /dev/null\n+++ b/x.o\n@@ -0,0 +1 @@\n+there already\n", PatchConflictError),
        (b"--- /dev/null\n+++ b/../out\n@@ -0,0 +1 @@\n+x\n", InvalidPatchError),
        (b"--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+x\n", InvalidPatchError),
        (b"--- /dev/null\n+++ b/link2/x\n@@ -0,0 +1 @@\n+x\n", MirrordError),
        (b'--- /dev/null\n+++ "b/x\\000y"\n@@ -0,0 +1 @@\n+x\n', InvalidPatchError),
        (b"--- /dev/null\n+++ b/x\0y\n@@ -0,0 +1 @@\n+x\n", InvalidPatchError),
        (b'diff --git "a/x\\000y" "b/x\\000y"\nnew file mode 100644\n', InvalidPatchError),
        (b"diff --git a/README b/x\0y\nrename from README\nrename to x\0y\n", InvalidPatchError),
        (b"not a patch", InvalidPatchError),
        (b"--- a/README\n+++ b/README\n@@ -1,9 +1,9 @@\n-2\n", InvalidPatchError),
    ],
)
def test_a_patch_that_does_not_apply_changes_nothing(
    service: Service, checkout: Checkout, patch: bytes, error: type[MirrordError], tmp_path: Path
) -> None:
    """Each refusal has its class; the tree, and what a link in it leads to, are as they were."""
    tree = Path(checkout.path)
    outside = tmp_path / "outside"
    outside.mkdir()
    run_as(USER_PEER.uid, f"echo 1 >x.o; ln -s {outside} link2", tree, service)
    good = b"--- a/empty2\n+++ b/empty2\n" if error is InvalidPatchError else b""
    with pytest.raises(error):
        apply(service, checkout, patch + good)
    assert as_user(tree, "status", "--porcelain") == "?? link2"
    assert not list(outside.iterdir())


def test_named_patches_are_the_graders(
    service: Service, checkout: Checkout, grading: Checkout, rich: Upstream
) -> None:
    """`@patch` brings the gold tree in a grader's checkout, and is refused in an agent's."""
    with pytest.raises(AccessError):
        service.call(service.checkouts.apply, checkout.id, USER_PEER, patch=None, named="@patch")
    tree = Path(grading.path)
    for strategy in ApplyStrategy:
        choices: dict[str, Any] = {"patch": None, "named": "@patch", "strategy": strategy}
        service.call(service.checkouts.apply, grading.id, ROOT_PEER, **choices)
        git(tree, "add", "--all")
        assert git(tree, "write-tree") == rich.git("rev-parse", "v3^{tree}")
        service.call(service.checkouts.apply, grading.id, ROOT_PEER, **choices, reverse=True)


def test_restore_writes_files_of_a_pinned_commit(
    service: Service, checkout: Checkout, grading: Checkout, rich: Upstream
) -> None:
    """Files and directories; only the grader's, only pinned commits, only paths of the checkout."""
    gold, other = rich.git("rev-parse", "v3"), rich.git("rev-parse", "v1")

    def restore(where: Checkout, commit: str, *paths: str) -> list[str]:
        peer = ROOT_PEER if where is grading else USER_PEER
        answer = service.call(
            service.checkouts.restore,
            where.id,
            peer,
            RestorePaths(commit=commit, paths=list(paths)),
        )
        return answer.paths

    assert restore(grading, gold, "docs", "README") == [
        "README",
        "docs/new2.txt",
        "docs/new3.txt",
        "docs/page.txt",
    ]
    assert (Path(grading.path) / "README").read_text() == "3\n" * 5
    with pytest.raises(AccessError):
        restore(checkout, gold, "README")
    with pytest.raises(CommitNotFoundError):
        restore(grading, other, "README")
    with pytest.raises(PathNotFoundError):
        restore(grading, gold, "no/such")
    for path in ("../x", "/etc/passwd", ".git/config", "a/../../b"):
        with pytest.raises(InvalidRequestError):
            restore(grading, gold, path)
