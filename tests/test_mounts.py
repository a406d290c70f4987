"""The raw mounts, on the real kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyone
import pytest
from mountlab import GIT, TREE, Lab, mounted_below, mountlab

from mirrord.checkouts.control import discard
from mirrord.errors import BackendUnavailableError, CheckoutBusyError
from mirrord.host import mounts
from mirrord.host.mounting import LocalMounter, OverlayOrder
from mirrord.host.processes import Capability, has_capabilities

USER = (12345, 12346)

pytestmark = pytest.mark.skipif(not mounts.may_mount(), reason="mounting needs CAP_SYS_ADMIN")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with mountlab() as made:
        yield made


@pytest.fixture
def mounter(lab: Lab) -> LocalMounter:
    return LocalMounter(lab.state)


def as_user(script: str, cwd: Path) -> str:
    done = subprocess.run(
        ["sh", "-c", script], cwd=cwd, user=USER[0], group=USER[1], extra_groups=[], capture_output=True, text=True, check=True
    )
    return done.stdout.rstrip("\n")


def make(top: Path, *names: str) -> list[str]:
    paths = [top / name for name in names]
    for path in paths:
        path.mkdir(parents=True)
    return [str(path) for path in paths]


def test_a_mount_shows_its_layers_and_keeps_writes_above(lab: Lab, mounter: LocalMounter) -> None:
    """What is written lands in the upper directory, and the layers stay as they are."""
    order = lab.checkout()
    mounter.mount(order)
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
    """More names than one page holds, the first of which hides the rest."""
    names = [f"psf__requests/{'x' * 100}/{number}" for number in range(70)]
    for number, name in enumerate(names):
        lab.layer(name, {"top": f"{number}\n", f"own-{number}": ""})
    order = lab.checkout(layers=tuple(names))
    mounter.mount(order)
    assert (lab.tree(order) / "top").read_text() == "0\n"
    assert len(list(lab.tree(order).iterdir())) == 71


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\\b", "a b", "a\nb", "lowerdir=x,upperdir=y", "é", "\udcff"])
def test_a_path_may_have_any_character(lab: Lab, name: str) -> None:
    """Options are split at commas and colons; paths are not."""
    lower, upper, work, tree = make(lab.state / name, "lower", "upper", "work", "tree")
    (Path(lower) / "file").touch()
    mounts.mount_overlay(tree, [lower], upper, work)
    assert (Path(tree) / "file").exists()
    assert tree in mounts.read_overlays()
    mounts.umount(tree)
    assert tree not in mounts.read_overlays()


def test_an_idmapped_layer_belongs_to_the_client(lab: Lab, mounter: LocalMounter) -> None:
    """The client owns, changes and deletes what the layer's owner made; the layer stays as it was."""
    mounter.make_idmap(USER)
    order = lab.checkout(USER)
    mounter.mount(order)
    tree = lab.tree(order)
    assert as_user("stat -c '%u %g' . README src src/main.py .git/HEAD | sort -u", tree) == "12345 12346"
    as_user("echo mine > README && rm -r src && mkdir src && touch src/new && chmod 600 README", tree)
    written = (lab.upper(order) / "README").stat()
    assert (written.st_uid, written.st_gid, written.st_mode & 0o777) == (*USER, 0o600)
    kept = (lab.template / "README").stat()
    assert (kept.st_uid, (lab.template / "README").read_text(), (lab.template / "src/main.py").exists()) == (0, "below\n", True)


def test_an_idmapped_layer_is_for_reading(lab: Lab, mounter: LocalMounter) -> None:
    """Nobody writes into templates by way of somebody's view of them, root included."""
    mounter.make_idmap(USER)
    with pytest.raises(OSError, match="Read-only"):
        (lab.state / "idmaps/12345-12346" / TREE / "README").write_text("x")


def test_an_idmap_that_is_dropped_leaves_its_mounts(lab: Lab, mounter: LocalMounter) -> None:
    """Overlays hold their layers; only new ones need the directory."""
    mounter.make_idmap(USER)
    mounter.make_idmap(USER)
    order = lab.checkout(USER)
    mounter.mount(order)
    mounter.drop_idmap(USER)
    mounter.drop_idmap(USER)
    assert as_user("cat README", lab.tree(order)) == "below"
    assert mounted_below(lab.state) == [str(lab.tree(order))]


def test_a_mount_with_a_process_inside_goes_away(lab: Lab, mounter: LocalMounter) -> None:
    """A process that sits in a tree keeps the old one for itself, and blocks nobody."""
    order = lab.checkout()
    mounter.mount(order)
    tree = lab.tree(order)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=tree) as inside:
        mounter.umount(order.checkout)
        assert list(tree.iterdir()) == []
        tree.rmdir()
        inside.communicate()


def test_everything_at_a_place_is_unmounted(lab: Lab, mounter: LocalMounter) -> None:
    """Mounts that were stacked by mistake go together; nothing there is fine."""
    first, second = lab.checkout(), lab.checkout()
    tree, upper, work = str(lab.tree(first)), str(lab.upper(second)), str(lab.upper(second).parent / "work")
    mounter.mount(first)
    mounts.mount_overlay(tree, [str(lab.template)], upper, work)
    mounts.umount(tree)
    assert mounted_below(lab.state) == []
    mounts.umount(tree)
    mounts.umount(f"{tree}/nothing")


def test_what_is_gone_is_told_apart_from_what_is_refused(lab: Lab, mounter: LocalMounter) -> None:
    """A layer that is missing can be made again; directories that no overlay can be made of are the host's matter."""
    order = lab.checkout()
    with pytest.raises(FileNotFoundError):
        mounter.mount(OverlayOrder(order.checkout, (GIT, TREE.replace("1", "3")), None))
    directory = str(lab.tree(order))
    with pytest.raises(BackendUnavailableError, match="Invalid argument"):
        mounts.mount_overlay(directory, [directory], "/proc", "/proc")


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


def test_a_process_knows_what_it_may_do() -> None:
    """The tests run with all capabilities, an ordinary process with none."""
    assert has_capabilities(Capability.SYS_ADMIN, Capability.CHOWN)
    script = "from mirrord.host.processes import may_give_files_away; from mirrord.host.mounts import may_mount; "
    done = subprocess.run(
        [*anyone.python(), "-c", f"{script} print(may_give_files_away(), may_mount())"],
        user=USER[0], group=USER[1], extra_groups=[], capture_output=True, text=True, check=True, env={},
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False"]


def test_what_resists_a_removal_is_found_again_under_the_name_it_had(tmp_path: Path) -> None:
    """Directories are moved up on the way; whoever tries again knows nothing of that."""
    (held,) = make(tmp_path, "checkout/a/b/mount")
    make(tmp_path, "checkout/a/c/d", "checkout/e/f")
    subprocess.run(["mount", "-t", "tmpfs", "none", held], check=True)
    try:
        with pytest.raises(CheckoutBusyError):
            discard(tmp_path / "checkout")
    finally:
        (at,) = tmp_path.rglob("mount")
        subprocess.run(["umount", at], check=True)
    assert os.listdir(tmp_path) == ["checkout"]
    discard(tmp_path / "checkout")
    assert os.listdir(tmp_path) == []
