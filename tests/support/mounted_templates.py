"""A state directory with templates to mount, made by hand, and taken away with all that is mounted in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mount_table import mount_lines

from mirrord.host import mounts
from mirrord.host.files import opened
from mirrord.host.mounting import Mounter
from mirrord.host.overlays import OverlayOrder
from mirrord.host.processes import Owner
from mirrord.model import new_checkout_id

TREE = "psf__requests/trees/" + "1" * 40 + "/files"
GIT = "psf__requests/gits/sealed-" + "2" * 40


KERNELS = [mounts.KERNEL, (6, 1)]
"""This machine's, and Debian 12's: its way to name layers and to show them as another user's works on newer ones too."""


class Lab:
    """Everything in it belongs to `uid`, as a daemon's state does."""

    def __init__(self, state: Path, uid: int) -> None:
        self.state = state
        self.uid = uid
        for name, mode in (("templates", 0o700), ("leases", 0o700), ("checkouts", 0o711)):
            self._make(state / name, mode)
        self.template = self.layer(TREE, {"README": "below\n", "src/main.py": "print(1)\n"})
        self.layer(GIT, {".git/HEAD": "2" * 40 + "\n"})

    def layer(self, name: str, files: dict[str, str]) -> Path:
        top = self.state / "templates" / name
        for path, text in files.items():
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text(text)
        subprocess.run(
            ["chown", "-R", f"{self.uid}:{self.uid}", str(self.state / "templates")], check=True
        )
        return top

    def checkout(
        self, owner: Owner | None = None, *, layers: tuple[str, ...] = (GIT, TREE)
    ) -> OverlayOrder:
        """A checkout's directory, ready to be mounted."""
        name = new_checkout_id()
        public, private = self.state / "checkouts" / name, self.state / "leases" / name
        for directory, mode in ((public, 0o711), (public / "tree", 0o755), (private, 0o700)):
            self._make(directory, mode)
        for part, mode in (("layer", 0o700), ("layer/upper", 0o755), ("layer/work", 0o700)):
            self._make(private / part, mode)
        seen = owner or (self.uid, self.uid)
        os.chown(private / "layer/upper", *seen)
        (private / "lease.json").write_text(
            json.dumps({"terms": {"owner_uid": seen[0], "owner_gid": seen[1]}})
        )
        return OverlayOrder(name, "layer", layers, owner)

    def mount(self, mounter: Mounter, order: OverlayOrder) -> None:
        """Make an overlay and show it."""
        with opened(mounter.make(order)) as mount:
            mounter.attach(order.checkout, mount)

    def tree(self, order: OverlayOrder) -> Path:
        return self.state / "checkouts" / order.checkout / "tree"

    def upper(self, order: OverlayOrder) -> Path:
        return self.state / "leases" / order.checkout / "layer/upper"

    def _make(self, directory: Path, mode: int) -> None:
        directory.mkdir(mode=mode, exist_ok=True)
        directory.chmod(mode)
        os.chown(directory, self.uid, self.uid)


def mounted_below(directory: Path) -> list[str]:
    """Where something is mounted, the deepest first."""
    lines = mount_lines()
    return sorted(
        (line.split()[4] for line in lines if line.split()[4].startswith(f"{directory}/")),
        reverse=True,
    )


def unmount_below(directory: Path) -> None:
    """Take away what daemons left mounted: a state directory is bound over itself, and mounts outlive a kill."""
    for path in mounted_below(directory):
        subprocess.run(["umount", "--lazy", path], check=False)


@contextmanager
def mounted_templates(uid: int = 0) -> Iterator[Lab]:
    state = Path(tempfile.mkdtemp(prefix="mm-"))
    state.chmod(0o711)
    os.chown(state, uid, uid)
    try:
        yield Lab(state, uid)
    finally:
        unmount_below(state)
        shutil.rmtree(state)


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Something mounted on it: it can be neither removed nor renamed, though what it is in can."""
    what = ["-t", "tmpfs", "tmpfs"] if path.is_dir() else ["--bind", str(path)]
    subprocess.run(["mount", *what, str(path)], check=True)
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield
    finally:
        now = os.readlink(f"/proc/self/fd/{descriptor}")
        os.close(descriptor)
        subprocess.run(["umount", now], check=True)
