"""Diff, apply and restore, with real git as the oracle: what `git add --all` makes of the dirty tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkoutlab import NAME, ROOT_PEER, USER_PEER, Service, as_user, run_as, running_service
from gitrepos import Upstream, git

from mirrord.errors import (
    AccessError,
    CheckoutBusyError,
    CommitNotFoundError,
    DiffTooLargeError,
    InvalidPatchError,
    MirrordError,
    PatchConflictError,
    PathNotFoundError,
    PathOutsideCheckoutError,
)
from mirrord.model import CommitId, View
from mirrord.protocol import Checkout, RestorePaths, StartCheckout

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
    "a submodule filled": "echo 1 >vendor/sub/f",
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
) -> Checkout:
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


def test_the_diff_has_the_files_of_a_nested_repository(
    service: Service, checkout: Checkout, rich: Upstream, tmp_path: Path
) -> None:
    """As files, without their history."""
    script = "git init -q nested; cd nested; echo 1 >f; git add f; git commit -qm n"
    run_as(USER_PEER.uid, script, Path(checkout.path), service)
    patch = service.diff(checkout)
    assert b"nested/f" in patch
    assert b"nested/.git" not in patch


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
    with pytest.raises(DiffTooLargeError):
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
        (b"--- /dev/null\n+++ b/../out\n@@ -0,0 +1 @@\n+x\n", PathOutsideCheckoutError),
        (b"--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+x\n", PathOutsideCheckoutError),
        (b"--- /dev/null\n+++ b/link2/x\n@@ -0,0 +1 @@\n+x\n", MirrordError),
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
    service.call(service.checkouts.apply, grading.id, ROOT_PEER, patch=None, named="@patch")
    tree = Path(grading.path)
    git(tree, "add", "--all")
    assert git(tree, "write-tree") == rich.git("rev-parse", "v3^{tree}")


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
        with pytest.raises(PathOutsideCheckoutError):
            restore(grading, gold, path)
