"""Clients that change their tree while the daemon works in it gain nothing, and get clear answers."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyone
import pytest
from checkout_parts import NAME, USER, USER_PEER, Service, as_user, running_service
from gitrepos import Upstream
from mounted_templates import mounted_below

from mirrord.errors import (
    CheckoutBusyError,
    ConflictError,
    InvalidPatchError,
    MirrordError,
    OwnerDeniedError,
    TooLargeError,
)
from mirrord.host.files import open_beneath, opened
from mirrord.host.processes import ActingAs, die_with_parent, dies_with_parent
from mirrord.host.trash import remove
from mirrord.model import TREE_DEPTH_LIMIT, Backend
from mirrord.patches.apply import CheckoutFiles
from mirrord.patches.change import JournaledChange
from mirrord.patches.diff import collect
from mirrord.patches.worktree import PatchJob, RawFile, open_worktree
from mirrord.protocol import Checkout, ForkCheckout, MakeSnapshot, ResetCheckout, StartCheckout

pytestmark = pytest.mark.root

_RACER = Path(__file__).parents[1] / "support/racer.py"
_NEW = b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """A commit with files below a directory named `.gitignore`, and many that sort after them."""
    made = Upstream(tmp_path_factory.mktemp("upstream") / "evil")
    files = {f"d/.gitignore-{number:05}": "x\n" for number in range(60)}
    made.commit({"README": "one\n", "d/.gitignore/evil": "old\n", "e/file": "e\n", **files})
    return made


@pytest.fixture(scope="module")
def service(upstream: Upstream) -> Iterator[Service]:
    with running_service(upstream, with_overlay=True) as running:
        yield running


@pytest.fixture(params=[Backend.POOL, Backend.OVERLAY])
def checkout(service: Service, request: pytest.FixtureRequest) -> Iterator[Checkout]:
    with held(service, request.param) as made:
        yield made


@pytest.fixture
def pooled(service: Service) -> Iterator[Checkout]:
    with held(service, Backend.POOL) as made:
        yield made


@contextmanager
def held(service: Service, backend: Backend) -> Iterator[Checkout]:
    made = service.call(
        service.checkouts.checkout,
        StartCheckout(instance=f"{NAME}@main", backend=backend),
        USER_PEER,
    )
    assert made.backend is backend
    yield made
    with suppress(MirrordError):
        service.call(service.checkouts.release, made.id, USER_PEER)


@pytest.fixture
def victim(service: Service) -> Iterator[Path]:
    """A directory that only root may read; a client may name it."""
    path = service.state / "victim"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def as_client(script: str, checkout: Checkout) -> None:
    subprocess.run(
        ["sh", "-ec", script],
        cwd=checkout.path,
        user=USER,
        group=USER,
        extra_groups=[],
        check=True,
        capture_output=True,
    )


def diff(service: Service, checkout: Checkout) -> bytes:
    return service.diff(checkout)


def apply(service: Service, checkout: Checkout, patch: bytes) -> Checkout:
    return service.call(service.checkouts.apply, checkout.id, USER_PEER, patch=patch)


def reset(service: Service, checkout: Checkout) -> Any:
    return service.call(service.checkouts.reset, checkout.id, ResetCheckout(), USER_PEER)


def work(service: Service, checkout: Checkout) -> PatchJob:
    """The arguments of a worker for a checkout."""
    root, scratch = Path(checkout.path), service.state / "scratch"
    return PatchJob(root, service.mirror, checkout.commit, checkout.tree, (USER, USER), scratch)


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_race_of_a_directory_and_a_link_writes_nothing_outside(
    service: Service, checkout: Checkout, victim: Path
) -> None:
    """Hundreds of diffs and patches while the client swaps two paths: each is answered or a conflict."""
    for at, name in ((".", "d"), ("d", ".gitignore")):
        prepare = (
            f"cd {at}; ln -s {victim} away; echo new >>{Path(checkout.path)}/d/.gitignore/evil"
        )
        as_client(prepare, checkout)
        racer = subprocess.Popen(
            [anyone.BARE_PYTHON, _RACER, "90", name, "away"], cwd=Path(checkout.path, at), user=USER, group=USER,
            extra_groups=[],
        )  # fmt: skip
        answers: Counter[int] = Counter()
        for turn in range(60):
            for call, extra in ((diff, ()), (apply, (_NEW % b"d/.gitignore/n%d" % turn,))):
                try:
                    call(service, checkout, *extra)
                    answers[200] += 1
                except MirrordError as error:
                    answers[error.http_status] += 1
        racer.kill()
        racer.wait()
        assert not list(victim.iterdir())
        assert answers[200]
        assert set(answers) <= {200, 400, 409}, answers
        reset(service, checkout)
    assert as_user(Path(checkout.path), "status", "--porcelain", "--ignored") == ""


def test_no_link_of_a_client_is_ever_read_through(
    service: Service, pooled: Checkout, victim: Path
) -> None:
    """Swaps after a directory was listed and before its entries are opened."""
    tree = Path(pooled.path)
    as_client(
        "cd d; ln -s ../../../victim away; echo new >.gitignore/evil; echo '*.o' >../.gitignore; : >x.o",
        pooled,
    )

    def exchange() -> None:
        (tree / "d/away").rename(tree / "d/aside")
        (tree / "d/.gitignore").rename(tree / "d/away")
        (tree / "d/aside").rename(tree / "d/.gitignore")

    def exchanging(look: Callable[..., RawFile | None], when: str) -> Callable[..., RawFile | None]:
        turns = iter(when)

        def look_later(*of: Any) -> RawFile | None:
            if next(turns, "0") == "1":
                exchange()
            return look(*of)

        return look_later

    (tree / "d/away").unlink()
    (tree / "d/away").symlink_to(victim)
    (victim / "evil").write_text("SECRET")
    changed = [b"d/.gitignore", b"d/.gitignore/evil", b".gitignore", b"d/x.o"]
    for turn in range(8):
        with suppress(MirrordError), open_worktree(work(service, pooled)) as worktree:
            looking = exchanging(worktree.read, f"{turn:03b}")
            worktree.read = looking  # type: ignore[method-assign]
            assert not any(b"SECRET" in change.data for change in collect(worktree, changed))
    assert [path.name for path in victim.iterdir()] == ["evil"]


def test_rules_that_are_links_say_nothing_and_are_in_the_diff(
    service: Service, checkout: Checkout
) -> None:
    """As in git, a `.gitignore` that is a link is not read."""
    as_client(
        "echo '*.o' >rules; ln -s ../rules e/.gitignore; : >e/x.o; ln -s rules e/.gitattributes",
        checkout,
    )
    patch = diff(service, checkout)
    as_user(Path(checkout.path), "add", "--all")
    listed = as_user(Path(checkout.path), "diff", "--cached", "--name-only").split()
    assert sorted(listed) == ["e/.gitattributes", "e/.gitignore", "e/x.o", "rules"]
    assert all(f"b/{name}".encode() in patch for name in listed)
    assert patch.count(b"new file mode 120000") == 2


# -- whose rights -----------------------------------------------------------------------------------------------------

_seen: list[tuple[str, int, str, list[str]]] | None = None
_IN_A_TREE = {
    "open",
    "os.mkdir",
    "os.symlink",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.chown",
    "os.utime",
}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Called on any thread; its own open is of a text path, and so not seen."""
    seen = _seen
    if seen is None or event not in _IN_A_TREE or not arguments:
        return
    if isinstance(arguments[0], bytes):
        status = Path("/proc/thread-self/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines())
        uid, capabilities = int(facts["Uid"].split()[3]), facts["CapEff"].strip()
        seen.append((event, uid, capabilities, facts["Groups"].split()))


sys.addaudithook(_watch)


def test_what_is_done_in_a_tree_is_done_as_its_owner(service: Service, pooled: Checkout) -> None:
    """With its uid and gid only and no capability; then the thread restores its own."""
    global _seen
    as_client("echo x >>README; mkdir new; echo 1 >new/f; ln -s README new/link", pooled)
    job = work(service, pooled)
    before = Path("/proc/thread-self/status").read_text()
    _seen = []
    try:
        with open_worktree(job) as worktree:
            files = CheckoutFiles(worktree)
            assert files.read(b"README") and files.read(b"new/link")
            made = dict.fromkeys((b"made/by", b"made/too"), 0o100644)
            change = JournaledChange(worktree.root, worktree.owner, worktree.reader, job.private)
            change.make([b"new/f"], made, lambda _: b"x\n", {})
            assert os.stat(b"made/by", dir_fd=worktree.root).st_uid == USER
    finally:
        seen, _seen = _seen, None
    in_tree = [each for each in seen if each[1] == USER]
    assert {"open", "os.mkdir"} <= {event for event, *_ in in_tree}
    assert {(caps, *groups) for _, _, caps, groups in in_tree} == {("0" * 16, str(USER))}
    after = Path("/proc/thread-self/status").read_text()
    for name in ("Uid", "Gid", "Groups", "CapEff"):
        assert next(line for line in after.splitlines() if line.startswith(name)) in before


def test_a_worker_still_dies_with_its_parent(service: Service) -> None:
    """The kernel clears it when a thread changes its uid (Linux 6.18)."""
    libc = ctypes.CDLL(None)
    die_with_parent(os.getppid())
    try:
        with ActingAs((USER, USER)) as owner:
            assert dies_with_parent()
            with owner.aside():
                assert dies_with_parent()
        assert dies_with_parent()
    finally:
        libc.prctl(1, 0, 0, 0, 0)


def test_a_file_that_its_client_may_not_read_is_not_in_its_diff(
    service: Service, checkout: Checkout
) -> None:
    """Hidden tests of a harness are refused by path unless ignored; files that the client locked are read."""
    tree = Path(checkout.path)
    as_client(
        "echo mine >mine; chmod 000 mine; mkdir locked; echo 2 >locked/f; chmod 000 locked",
        checkout,
    )
    assert b"+mine" in (patch := diff(service, checkout))
    assert b"b/locked/f" in patch
    assert stat.S_IMODE((tree / "mine").stat().st_mode) == 0
    for path in ("hidden_test.py", "private/test.py"):
        (tree / path).parent.mkdir(mode=0o700, exist_ok=True)
        (tree / path).write_text("SECRET")
        (tree / path).chmod(0o600)
        with pytest.raises(OwnerDeniedError, match=Path(path).parts[0]) as refused:
            diff(service, checkout)
        assert refused.value.http_status == 403
        with pytest.raises(OwnerDeniedError):
            apply(service, checkout, _NEW % path.encode())
        apply(service, checkout, _NEW % (b"beside/" + path.encode()))
        (tree / ".gitignore").write_text("hidden_test.py\nprivate/\n")
        assert b"SECRET" not in diff(service, checkout)
        (tree / ".gitignore").unlink()
        shutil.rmtree(tree / "private") if "/" in path else (tree / path).unlink()


def test_a_patch_is_applied_as_its_client_may(service: Service, checkout: Checkout) -> None:
    """Not into another user's closed directory."""
    tree = Path(checkout.path)
    os.chown(tree / "e", 0, 0)
    with pytest.raises(OwnerDeniedError):
        apply(service, checkout, _NEW % b"e/new")
    assert [path.name for path in (tree / "e").iterdir()] == ["file"]


UNIT = """
from pathlib import Path
from checkout_parts import NAME, USER, USER_PEER, running_service, passable_directory
from gitrepos import Upstream
from mirrord.errors import MirrordError
from mirrord.model import Backend
from mirrord.protocol import ResetCheckout, StartCheckout

def code_of(call, *args, **kwargs):
    try:
        return service.call(call, made.id, *args, **kwargs)
    except MirrordError as error:
        return error.code

with passable_directory() as place:
    upstream = Upstream(place / "upstream")
    upstream.commit({"README": "one\\n", "d/file": "old\\n"})
    with running_service(upstream) as service:
        made = service.call(service.checkouts.checkout, StartCheckout(instance=f"{NAME}@main", backend=Backend.POOL), USER_PEER)
        tree = Path(made.path)
        print("=", {(found.st_uid, found.st_gid) for found in [path.lstat() for path in [tree, *tree.rglob("*")]]})
        (tree / "README").write_bytes(b"changed\\n")
        (tree / "secret").write_text("SECRET")
        (tree / "secret").chmod(0o600)
        print("=", code_of(service.checkouts.diff, USER_PEER))
        (tree / "secret").unlink()
        (tree / "d").rename(tree / "e")
        (tree / "d").symlink_to("/etc")
        print("=", b"+changed" in code_of(service.checkouts.diff, USER_PEER).content)
        patch = b"--- /dev/null\\n+++ b/new/file\\n@@ -0,0 +1 @@\\n+x\\n"
        code_of(service.checkouts.apply, USER_PEER, patch=patch)
        print("=", (tree / "new/file").stat().st_uid, (tree / "new").stat().st_uid)
        proof = service.call(service.checkouts.reset, made.id, ResetCheckout(), USER_PEER).proof
        print("=", proof.files_restored, sorted(path.name for path in tree.iterdir()))
"""
"""Runs a pool in a daemon with the file capabilities of `mirrord.service` only."""


def test_a_daemon_without_setuid_judges_by_mode(tmp_path: Path) -> None:
    """The unit's capabilities give access to every file, but no change of uid."""
    kept = "+chown,+fowner,+dac_override,+dac_read_search,+linux_immutable"
    drop = [
        "setpriv",
        "--reuid=4711",
        "--regid=4711",
        "--clear-groups",
        f"--inh-caps=-all,{kept}",
        f"--ambient-caps=-all,{kept}",
    ]
    done = subprocess.run(
        [*drop, *anyone.python(), "-c", UNIT], capture_output=True, text=True, check=False, cwd="/"
    )
    assert [line[2:] for line in done.stdout.splitlines() if line.startswith("= ")] == [
        f"{{({USER}, {USER})}}",
        "owner-denied",
        "True",
        f"{USER} {USER}",
        "3 ['.git', 'README', 'd']",
    ], done.stderr


# -- mounts -----------------------------------------------------------------------------------------------------------


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", source, target], check=True)
    try:
        yield
    finally:
        for point in mounted_below(target.parent.parent):
            if point.endswith(target.name):
                subprocess.run(["umount", point], check=True)


@pytest.fixture
def foreign(service: Service) -> Iterator[Path]:
    """A directory of the client outside the checkout, on the same file system."""
    path = service.state / "foreign"
    (path / "deep").mkdir(parents=True)
    (path / "data").write_text("data")
    subprocess.run(["chown", "-R", f"{USER}:{USER}", path], check=True)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("where", [".", "e", "README", "extra/in"])
def test_what_is_mounted_in_a_tree_is_left_alone(
    service: Service, pooled: Checkout, foreign: Path, where: str
) -> None:
    """A reset names the mount, changes nothing, and works afterwards."""
    tree = Path(pooled.path)
    as_client("mkdir -p extra/in; echo x >>d/.gitignore/evil", pooled)
    source = foreign / "data" if where == "README" else foreign
    with bound(source, tree / where):
        for _ in range(2):
            with pytest.raises(CheckoutBusyError) as refused:
                reset(service, pooled)
            assert refused.value.facts["path"] == str(tree / where).removesuffix("/.")
        with suppress(CheckoutBusyError):
            diff(service, pooled)
        assert sorted(path.name for path in foreign.iterdir()) == ["data", "deep"]
    assert (tree / "d/.gitignore/evil").read_text() == "old\nx\n"
    assert reset(service, pooled).proof.files_restored == 1


@pytest.mark.parametrize("where", [".", "e", "extra/in"])
def test_a_released_tree_with_a_mount_is_not_kept(
    service: Service, foreign: Path, where: str
) -> None:
    """The owner's next checkout works; mounted files stay, and the tree is removed with the mount."""
    with held(service, Backend.POOL) as made:
        as_client("mkdir -p extra/in", made)
        subprocess.run(["mount", "--bind", foreign, Path(made.path, where)], check=True)
        service.call(service.checkouts.release, made.id, USER_PEER)
    with held(service, Backend.POOL) as next_one:
        assert as_user(Path(next_one.path), "status", "--porcelain") == ""
        assert sorted(path.name for path in foreign.iterdir()) == ["data", "deep"]
    for point in mounted_below(service.state / "checkouts"):
        if (
            foreign.name
            in subprocess.run(
                ["findmnt", "-no", "SOURCE", point], capture_output=True, text=True, check=False
            ).stdout
        ):
            subprocess.run(["umount", point], check=True)


def test_nothing_behind_a_mount_is_removed(tmp_path: Path) -> None:
    """A bind mount of the same file system, with the same device number, is refused too."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/data").touch()
    (tmp_path / "tree/in").mkdir(parents=True)
    with (
        bound(tmp_path / "kept", tmp_path / "tree/in"),
        opened(os.open(tmp_path, os.O_RDONLY)) as top,
    ):
        with pytest.raises(CheckoutBusyError):
            remove(top, b"tree")
        with pytest.raises(OSError, match="cross-device"):
            open_beneath(top, b"tree/in")
    assert (tmp_path / "kept/data").exists()


# -- the store --------------------------------------------------------------------------------------------------------


def hashes(directory: Path) -> dict[str, str]:
    """The content of every file below a directory."""
    script = "find . -type f -print0 | xargs -0r sha1sum"
    done = subprocess.run(
        ["sh", "-c", script], cwd=directory, capture_output=True, text=True, check=True
    )
    return {line[42:]: line[:40] for line in done.stdout.splitlines()}


def test_root_in_a_container_writes_nothing_but_its_checkout(
    service: Service, checkout: Checkout
) -> None:
    """It writes every file of its tree and `.git` in place; stores and other checkouts do not change."""
    with held(service, Backend(checkout.backend)) as neighbour:
        before = hashes(service.state / "templates")
        script = f"""
mount --make-rprivate /; mount --rbind {Path(checkout.path).parent} /mnt; cd /mnt/tree
mount -t tmpfs none {service.state}
find . -type f | while read -r file; do
    chmod u+w "$file"; printf JUNK | dd of="$file" conv=notrunc status=none; chmod 4755 "$file"
done
for way in remount,rw remount,bind,rw remount,bind,exec,suid,dev; do mount -o "$way" /mnt/tree || true; done"""
        subprocess.run(["unshare", "-m", "sh", "-c", script], check=True, capture_output=True)
        assert (
            next(Path(checkout.path, ".git/objects/pack").glob("*.pack"))
            .read_bytes()
            .startswith(b"JUNK")
        )
        assert hashes(service.state / "templates") == before
        assert as_user(Path(neighbour.path), "status", "--porcelain") == ""
        as_user(Path(neighbour.path), "fsck", "--full", "--strict")
    reset(service, checkout)
    assert as_user(Path(checkout.path), "status", "--porcelain") == ""


def test_no_file_of_a_pooled_checkout_is_a_file_of_a_store(
    service: Service, pooled: Checkout
) -> None:
    """No inode is shared, including packs, indexes and commit-graphs; all files are the client's."""
    own = [path.lstat() for path in Path(pooled.path).parent.rglob("*")]
    store = {path.lstat().st_ino for path in (service.state / "templates").rglob("*")}
    assert not {found.st_ino for found in own} & store
    files = [path.lstat() for path in Path(pooled.path).rglob("*") if path.is_file()]
    assert {(found.st_nlink, found.st_uid, found.st_gid) for found in files} == {(1, USER, USER)}


# -- shapes -----------------------------------------------------------------------------------------------------------


def deep(name: str, depth: int) -> str:
    return f'python3 -c \'import os\nfor _ in range({depth}): os.mkdir("{name}"); os.chdir("{name}")\nopen("leaf", "w")\''


@pytest.mark.parametrize(
    "script",
    {
        "3,000 directories deep": deep("d", 3000),
        "a path of 12 kB": deep("n" * 240, 50),
        "just below the limit": deep("d", TREE_DEPTH_LIMIT + 1),
    }.values(),
)
def test_a_tree_that_is_too_deep_is_refused(
    service: Service, checkout: Checkout, script: str
) -> None:
    """With a status that clients do not retry; a reset removes it; an ignored one is not read."""
    as_client(f"mkdir tower; cd tower; {script}", checkout)
    with pytest.raises(TooLargeError) as refused:
        diff(service, checkout)
    assert refused.value.http_status == 422
    as_client("echo tower >.gitignore", checkout)
    assert b"b/.gitignore" in diff(service, checkout)
    reset(service, checkout)
    assert os.listdir(checkout.path) == os.listdir(checkout.path)
    assert not Path(checkout.path, "tower").exists()


@pytest.mark.parametrize(
    "name",
    [
        b"n" * 300,
        b"a/" + b"n" * 300 + b"/x",
        b"/".join([b"n" * 100] * 60),
        b"/".join([b"d"] * 1500),
    ],
)
def test_a_patch_with_a_name_that_no_tree_holds_is_refused(
    service: Service, checkout: Checkout, name: bytes
) -> None:
    """The status is one that clients do not retry."""
    with pytest.raises(InvalidPatchError):
        apply(service, checkout, _NEW % name)
    assert as_user(Path(checkout.path), "status", "--porcelain") == ""


def test_attributes_that_git_refuses_are_the_clients(service: Service, checkout: Checkout) -> None:
    """An unknown encoding."""
    as_client("echo '*.txt working-tree-encoding=BOGUS' >.gitattributes; echo x >a.txt", checkout)
    with pytest.raises(ConflictError, match=r"a\.txt") as refused:
        diff(service, checkout)
    assert refused.value.http_status == 409


def test_what_changes_its_kind_while_it_is_read_is_no_bug(
    service: Service, pooled: Checkout
) -> None:
    """A file, a link, a directory and a pipe alternate at one path."""
    script = """
i=0; while [ $i -lt 150 ]; do i=$((i+1))
rm -rf README; ln -s e README; rm README; mkdir README; : >README/x; rm -r README; mkfifo README; rm README; echo $i >README
done"""
    changer = subprocess.Popen(
        ["sh", "-c", script], cwd=pooled.path, user=USER, group=USER, extra_groups=[]
    )
    answers = Counter[int]()
    while changer.poll() is None:
        try:
            diff(service, pooled)
            answers[200] += 1
        except MirrordError as error:
            answers[error.http_status] += 1
    assert set(answers) <= {200, 409}, answers


_RESTLESS = """
i=0; while [ $i -lt 60 ]; do i=$((i+1))
rm -rf README; mkdir -p README/in; : >README/in/x; rm -rf README; mkfifo README; rm README; echo $i >README
mv .git/index .git/was; mv .git/was .git/index; rm -rf .git/refs/x; mkdir -p .git/refs/x/y; : >.git/refs/x/y/z
rm -rf new; mkdir -p new/a/b; : >new/a/b/c; mv new/a new/d
done"""


def test_a_copy_of_what_never_rests_is_busy_and_no_bug(
    service: Service, checkout: Checkout
) -> None:
    """Forks and snapshots, on both backends."""

    def fork() -> None:
        made = service.call(service.checkouts.fork, checkout.id, ForkCheckout(), USER_PEER)
        service.call(service.checkouts.release, made.id, USER_PEER)

    def snapshot() -> None:
        made = service.call(service.checkouts.snapshot, checkout.id, MakeSnapshot(), USER_PEER)
        # else a slow changer lasts for more snapshots than a checkout may have
        service.call(service.checkouts.remove_snapshot, checkout.id, made.name, USER_PEER)

    answers = Counter[str]()
    with subprocess.Popen(
        ["sh", "-c", _RESTLESS], cwd=checkout.path, user=USER, group=USER, extra_groups=[]
    ) as changer:
        while changer.poll() is None:
            for copy in (fork, snapshot):
                try:
                    copy()
                    answers["made"] += 1
                except MirrordError as error:
                    answers[error.code] += 1
    assert answers.keys() <= {"made", "checkout-busy"}, answers
