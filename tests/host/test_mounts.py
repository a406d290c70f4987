"""The mount system calls, on the real kernel."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyone
import pytest
from mount_table import mount_lines
from mounted_templates import GIT, KERNELS, TREE, Lab, mounted_below, mounted_templates

from mirrord.errors import BackendUnavailableError, CheckoutBusyError
from mirrord.host import mount_tables, mounts
from mirrord.host.files import opened
from mirrord.host.mounting import LocalMounter, probe_overlay
from mirrord.host.overlays import MappedTemplates, OverlayOrder
from mirrord.host.processes import Capability, has_capabilities
from mirrord.host.trash import remove_tree

USER = (12345, 12346)

pytestmark = [
    pytest.mark.skipif(not mounts.may_mount(), reason="mounting needs CAP_SYS_ADMIN"),
    pytest.mark.root,
]


@pytest.fixture(autouse=True, params=KERNELS, ids=str)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """The version that the code believes to run on."""
    monkeypatch.setattr(mounts, "KERNEL", request.param)
    version: tuple[int, ...] = request.param
    return version


@pytest.fixture
def lab() -> Iterator[Lab]:
    with mounted_templates() as made:
        yield made


@pytest.fixture
def mounter(lab: Lab) -> Iterator[LocalMounter]:
    made = LocalMounter(lab.state)
    yield made
    made.close(unbind=False)


def as_user(script: str, cwd: Path) -> str:
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=cwd,
        user=USER[0],
        group=USER[1],
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip("\n")


def make(top: Path, *names: str) -> list[str]:
    paths = [top / name for name in names]
    for path in paths:
        path.mkdir(parents=True)
    return [str(path) for path in paths]


def test_a_mount_shows_its_layers_and_writes_to_the_upper_one(
    lab: Lab, mounter: LocalMounter
) -> None:
    order = lab.checkout()
    lab.mount(mounter, order)
    tree = lab.tree(order)
    assert (tree / "README").read_text() == "below\n"
    assert (tree / ".git/HEAD").exists()
    (tree / "README").write_text("above\n")
    (tree / "src").rename(tree / "renamed")
    assert (lab.template / "README").read_text() == "below\n"
    assert (lab.upper(order) / "README").read_text() == "above\n"
    mounter.umount(order.checkout)
    assert list(tree.iterdir()) == []
    assert mounted_below(lab.state) == []


def test_many_layers_mount(lab: Lab, mounter: LocalMounter) -> None:
    """More than one option has room for; upper ones hide lower ones."""
    names = [f"psf__requests/{'x' * 100}/{number}" for number in range(70)]
    for number, name in enumerate(names):
        lab.layer(name, {"top": f"{number}\n", f"own-{number}": ""})
    order = lab.checkout(layers=tuple(names))
    lab.mount(mounter, order)
    assert (lab.tree(order) / "top").read_text() == "0\n"
    assert len(list(lab.tree(order).iterdir())) == 71


@contextmanager
def overlay_of(lower: Path, layer: Path) -> Iterator[int]:
    """A detached overlay."""
    with ExitStack() as stack:
        paths = (lower, layer / "upper", layer / "work")
        below, upper, work = (
            stack.enter_context(opened(os.open(path, os.O_PATH))) for path in paths
        )
        yield stack.enter_context(opened(mounts.make_overlay([below], upper, work)))


@pytest.mark.parametrize(
    "name", ["a,b", "a:b", "a\\b", "a b", "a\nb", "lowerdir=x,upperdir=y", "é", "\udcff"]
)
def test_a_path_may_have_any_character(lab: Lab, name: str) -> None:
    """Options are split at commas and colons; paths of descriptors have neither."""
    lower, _, _, tree = make(lab.state / name, "lower", "upper", "work", "tree")
    (Path(lower) / "file").touch()
    with overlay_of(Path(lower), lab.state / name) as mount:
        mounts.attach(mount, tree)
    assert (Path(tree) / "file").exists()
    assert tree in mount_tables.read_overlays()
    mounts.umount(tree)
    assert tree not in mount_tables.read_overlays()


def test_the_table_of_mounts_shows_only_the_checkout(lab: Lab, mounter: LocalMounter) -> None:
    """Every user may read it: no commit, no owner, and no path but the checkout's."""
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    (line,) = [line for line in mount_lines() if order.checkout in line]
    assert line.split()[4] == str(lab.tree(order))
    said = line.replace(str(lab.tree(order)), "")
    for secret in (
        "1" * 40,
        "2" * 40,
        "psf__requests",
        "templates",
        "leases",
        "12345",
        "12346",
        str(lab.state),
    ):
        assert secret not in said


def test_an_idmapped_layer_belongs_to_the_client(lab: Lab, mounter: LocalMounter) -> None:
    """The client owns, changes and deletes the layer's files; the layer does not change."""
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    tree = lab.tree(order)
    assert (
        as_user("stat -c '%u %g' . README src src/main.py .git/HEAD | sort -u", tree)
        == "12345 12346"
    )
    as_user(
        "echo mine > README && rm -r src && mkdir src && touch src/new && chmod 600 README", tree
    )
    written = (lab.upper(order) / "README").stat()
    assert (written.st_uid, written.st_gid, written.st_mode & 0o777) == (*USER, 0o600)
    kept = (lab.template / "README").stat()
    assert (
        kept.st_uid,
        (lab.template / "README").read_text(),
        (lab.template / "src/main.py").exists(),
    ) == (0, "below\n", True)


def test_an_idmapped_layer_is_private_and_read_only(lab: Lab, kernel: tuple[int, ...]) -> None:
    """No path leads to it except root's, and not even root writes to templates through it."""
    mapped = MappedTemplates(str(lab.state / "idmaps"))
    with (
        opened(os.open(lab.state / "templates", os.O_PATH)) as templates,
        mapped.view(templates, USER) as clone,
    ):
        assert os.stat(f"{TREE}/README", dir_fd=clone).st_uid == USER[0]
        with pytest.raises(OSError, match="Read-only"):
            os.open(f"{TREE}/README", os.O_WRONLY, dir_fd=clone)
        place = lab.state / "idmaps"
        attached_ids = {line.split()[0] for line in mount_lines()}
        assert (str(mounts.mount_id(clone)) in attached_ids) == (kernel < (6, 15))
        if kernel >= (6, 15):
            assert mounted_below(lab.state) == []
        else:
            attached, room = mounted_below(lab.state)
            assert (room, Path(attached).parent, place.stat().st_mode & 0o777) == (
                str(place),
                place,
                0o700,
            )
            assert re.fullmatch("[0-9a-f]{16}", Path(attached).name)
            mountinfo = mount_lines()
            said = " ".join(line for line in mountinfo if str(place) in line)
            assert not re.search(r"\b(1234[56]|shared:|master:)", said)
    mapped.close()
    assert mounted_below(lab.state) == []


def test_attached_clones_of_a_killed_daemon_are_unmounted_at_the_next_start(
    lab: Lab, kernel: tuple[int, ...]
) -> None:
    """Existing overlays keep their layers."""
    killed, order, other = LocalMounter(lab.state), lab.checkout(USER), lab.checkout((20000, 20000))
    lab.mount(killed, order)
    left = set(mounted_below(lab.state / "idmaps"))
    assert len(left) == (0 if kernel >= (6, 15) else 1)
    started = LocalMounter(lab.state)
    lab.mount(started, other)
    now = set(mounted_below(lab.state / "idmaps"))
    assert (len(now), left & now) == (len(left), set())
    started.close(unbind=False)
    assert sorted(mounted_below(lab.state)) == sorted(
        str(lab.tree(each)) for each in (order, other)
    )
    assert (lab.tree(order) / "README").stat().st_uid == USER[0]
    assert (lab.tree(other) / "src/main.py").read_text() == "print(1)\n"


def test_a_clone_in_use_is_not_closed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when many other owners come, nor when the templates are replaced."""
    monkeypatch.setattr(MappedTemplates, "MAX", 16)
    mapped = MappedTemplates(str(lab.state / "idmaps"))
    with (
        opened(os.open(lab.state / "templates", os.O_PATH)) as templates,
        mapped.view(templates, USER) as clone,
    ):
        for uid in range(20000, 20000 + MappedTemplates.MAX + 1):
            with mapped.view(templates, (uid, uid)):
                pass
        assert USER not in mapped
        order = lab.checkout(USER)
        upper, work = (
            os.open(lab.upper(order).with_name(name), os.O_PATH) for name in ("upper", "work")
        )
        lower = os.open(TREE, os.O_PATH, dir_fd=clone)
        with (
            opened(upper),
            opened(work),
            opened(lower),
            opened(mounts.make_overlay([lower], upper, work)) as mount,
        ):
            assert os.stat("README", dir_fd=mount).st_uid == USER[0]
    assert len(mounted_below(lab.state / "idmaps")) in (
        0,
        MappedTemplates.MAX,
    )  # the one that went was detached
    mapped.close()
    assert mounted_below(lab.state) == []


def test_replaced_templates_are_cloned_again(lab: Lab, mounter: LocalMounter) -> None:
    """The clone of the old directory would be empty."""
    lab.mount(mounter, lab.checkout(USER))
    (lab.state / "templates").rename(lab.state / "old")
    lab.layer(TREE, {"README": "other\n"})
    order = lab.checkout(USER, layers=(TREE,))
    lab.mount(mounter, order)
    assert as_user("cat README", lab.tree(order)) == "other"


def slave_of(directory: Path, at: Path) -> subprocess.Popen[str]:
    """A shell in a mount namespace of its own, as a container's, with `directory` bound rslave."""
    at.mkdir()
    enter = f"mount --rbind {directory} {at} && echo ready && exec sh"
    command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", enter]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    return shell


def test_an_overlay_is_replaced_in_one_step_for_all_who_see_it(
    lab: Lab, mounter: LocalMounter, tmp_path: Path
) -> None:
    """A container that bound the directory follows and writes to the new layer; nothing is left stacked."""
    mounter.open()
    first = lab.checkout()
    lab.mount(mounter, first)
    tree = lab.tree(first)
    with slave_of(tree.parent, tmp_path / "container") as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        for turn in range(3):
            other = lab.checkout()
            with overlay_of(lab.template, lab.upper(other).parent) as mount:
                mounts.replace(mount, str(tree))
            (lab.upper(other) / "from").write_text(f"{turn}")
            print(
                f"cat {tmp_path}/container/tree/from; echo;"
                f" echo {turn} >{tmp_path}/container/tree/mine; echo",
                file=shell.stdin,
                flush=True,
            )
            assert [shell.stdout.readline() for _ in range(2)] == [f"{turn}\n", "\n"]
            assert (
                (tree / "mine").read_text()
                == (lab.upper(other) / "mine").read_text()
                == f"{turn}\n"
            )
            assert mounted_below(lab.state / "checkouts") == [str(tree)]
        print(
            f"grep -c {tmp_path}/container/tree /proc/self/mountinfo", file=shell.stdin, flush=True
        )
        assert shell.stdout.readline() == "1\n"
        shell.stdin.close()


def test_replacing_nothing_mounts(lab: Lab, mounter: LocalMounter) -> None:
    """As after a reboot, and without MOVE_MOUNT_BENEATH."""
    order = lab.checkout()
    with opened(mounter.make(order)) as mount:
        mounter.replace(order.checkout, mount)
    assert (lab.tree(order) / "README").exists()


def test_client_directories_are_bound_nosuid_and_nodev(lab: Lab, mounter: LocalMounter) -> None:
    """Once, however often a daemon starts; the bind propagates, and is undone when unused."""
    for _ in range(2):
        LocalMounter(lab.state).open()
    bound = [str(lab.state / name) for name in ("leases", "checkouts")]
    assert mounted_below(lab.state) == bound
    lines = [line.split() for line in mount_lines() if line.split()[4] in bound]
    assert all(
        {"nosuid", "nodev"} <= {*line[5].split(",")} and line[6].startswith("shared:")
        for line in lines
    )
    order = lab.checkout()
    lab.mount(mounter, order)
    mounter.close(unbind=True)
    assert mounted_below(lab.state) == [str(lab.tree(order)), bound[1]]
    mounter.umount(order.checkout)
    mounter.close(unbind=True)
    assert mounted_below(lab.state) == []


def test_a_mount_in_use_is_unmounted(lab: Lab, mounter: LocalMounter) -> None:
    """A process inside keeps the old tree, and blocks nothing."""
    order = lab.checkout()
    lab.mount(mounter, order)
    tree = lab.tree(order)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tree) as inside:
        mounter.umount(order.checkout)
        assert list(tree.iterdir()) == []
        tree.rmdir()
        inside.communicate()


def test_everything_at_a_place_is_unmounted(lab: Lab, mounter: LocalMounter) -> None:
    """Stacked mounts too; no mount is fine."""
    first, second = lab.checkout(), lab.checkout()
    tree = str(lab.tree(first))
    lab.mount(mounter, first)
    with overlay_of(lab.template, lab.upper(second).parent) as mount:
        mounts.attach(mount, tree)
    mounts.umount(tree)
    assert mounted_below(lab.state) == []
    mounts.umount(tree)
    mounts.umount(f"{tree}/nothing")


def test_a_missing_path_differs_from_a_refusal(lab: Lab, mounter: LocalMounter) -> None:
    """A missing layer can be made again; a refusal is a matter of the host."""
    order = lab.checkout()
    with pytest.raises(FileNotFoundError):
        mounter.make(OverlayOrder(order.checkout, "layer", (GIT, TREE.replace("1", "3")), None))
    with (
        opened(os.open("/proc", os.O_PATH)) as proc,
        pytest.raises(BackendUnavailableError, match="Invalid argument"),
    ):
        mounts.make_overlay([proc], proc, proc)


def test_a_descent_follows_no_link(lab: Lab) -> None:
    """Neither out of the directory nor within it."""
    (lab.state / "link").symlink_to("templates")
    (lab.state / "out").symlink_to("/etc")
    fd = os.open(lab.state, os.O_RDONLY)
    try:
        os.close(mounts.open_beneath(fd, "templates/psf__requests"))
        for path in (
            "link",
            "link/psf__requests",
            "out",
            "../tmp",
            "/etc",
            "templates/../templates/../..",
            f"/proc/self/fd/{fd}",
        ):
            with pytest.raises(FileNotFoundError):
                mounts.open_beneath(fd, path)
    finally:
        os.close(fd)


def test_capabilities_are_detected() -> None:
    """The tests run with all capabilities, an ordinary process with none."""
    assert has_capabilities(Capability.SYS_ADMIN, Capability.CHOWN)
    script = "from mirrord.host.processes import may_give_files_away; "
    script += "from mirrord.host.mounts import may_mount; "
    done = subprocess.run(
        [*anyone.python(), "-c", f"{script} print(may_give_files_away(), may_mount())"],
        user=USER[0],
        group=USER[1],
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_failed_removal_restores_moved_directories(tmp_path: Path) -> None:
    """Deep directories are moved up on the way; the next try knows only the first name."""
    (held,) = make(tmp_path, f"checkout/{'a/' * 70}mount")
    make(tmp_path, "checkout/a/c/d", "checkout/e/f")
    subprocess.run(["mount", "-t", "tmpfs", "none", held], check=True)
    try:
        with pytest.raises(CheckoutBusyError):
            remove_tree(tmp_path / "checkout")
    finally:
        (at,) = tmp_path.rglob("mount")
        subprocess.run(["umount", at], check=True)
    assert os.listdir(tmp_path) == ["checkout"]
    remove_tree(tmp_path / "checkout")
    assert os.listdir(tmp_path) == []


class _RefusingMounter(LocalMounter):
    """Makes no mount, and remembers what a kill at that moment would leave of the lease."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.left: list[list[str]] = []
        self._leases = state / "leases"

    def make(self, _order: OverlayOrder) -> int:
        self.left += [sorted(os.listdir(path)) for path in self._leases.iterdir()]
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.root
def test_a_trial_that_ends_early_leaves_no_lease(tmp_path: Path) -> None:
    """A start on a full disk, or a kill of it: the next start would set a torn lease aside."""
    for name in ("leases", "checkouts", "templates"):
        (tmp_path / name).mkdir()
    mounter = _RefusingMounter(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        probe_overlay(tmp_path, mounter)
    assert mounter.left == [["layer", "lease.json.new"]]
    assert not [
        path
        for name in ("leases", "checkouts", "templates")
        for path in (tmp_path / name).iterdir()
    ]
