"""Limits of memory and processes for all that runs in a sandbox: a control group of its own.

Version 2 of the kernel's interface and version 1; only where this process may write there, which
is mostly root. A group that a killed client left, empty as its processes ended with it, is removed
when the next one is made.
"""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = "mirrord-sandbox-{}-{}"


class ControlGroup:
    """A group of processes, with the bounds that were asked for."""

    def __init__(self, memory_bytes: int | None, processes: int | None) -> None:
        """Raises OSError where the kernel or its mounts allow none."""
        wanted = {"memory": memory_bytes, "pids": processes}
        self._limits = {name: limit for name, limit in wanted.items() if limit is not None}
        self._is_unified = (_ROOT / "cgroup.controllers").exists()
        parents = self._parents()
        for parent in set(parents.values()):
            _sweep(parent)
        name = _NAME.format(os.getpid(), os.urandom(4).hex())
        self._paths = {controller: parent / name for controller, parent in parents.items()}
        try:
            for path in set(self._paths.values()):
                path.mkdir(mode=0o755)
            self._set_limits()
        except OSError:
            self.remove()
            raise

    def _parents(self) -> dict[str, Path]:
        """For each controller the group in which ours is made."""
        if not self._is_unified:
            return {controller: _own_group(controller) for controller in self._limits}
        # A group that holds processes, as our own, may pass no controller to others.
        parent = _ROOT / "mirrord"
        parent.mkdir(exist_ok=True)
        enabled = " ".join(f"+{controller}" for controller in self._limits)
        (parent / "cgroup.subtree_control").write_text(enabled)
        return dict.fromkeys(self._limits, parent)

    def _set_limits(self) -> None:
        for controller, limit in self._limits.items():
            path = self._paths[controller]
            if controller == "pids":
                (path / "pids.max").write_text(str(limit))
            elif self._is_unified:
                (path / "memory.max").write_text(str(limit))
                with suppress(FileNotFoundError):  # a kernel without swap
                    (path / "memory.swap.max").write_text("0")
            else:
                (path / "memory.limit_in_bytes").write_text(str(limit))
                with suppress(FileNotFoundError):
                    (path / "memory.memsw.limit_in_bytes").write_text(str(limit))

    def entering(self) -> list[str]:
        """The start of a command that enters the group, then replaces itself by what follows."""
        enter = 'until [ "$1" = -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'
        members = [f"{path}/cgroup.procs" for path in sorted(set(self._paths.values()))]
        return ["sh", "-c", enter, "sh", *members, "--"]

    def strikes(self) -> dict[str, int]:
        """How often each limit struck so far."""
        events = "memory.events" if self._is_unified else "memory.oom_control"
        files = {"memory": (events, "oom_kill"), "pids": ("pids.events", "max")}
        found = {}
        for controller, path in self._paths.items():
            file, key = files[controller]
            lines = dict(line.split() for line in (path / file).read_text().splitlines())
            found[controller] = int(lines.get(key, 0))
        return found

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        for path in set(self._paths.values()):
            with suppress(OSError):
                path.rmdir()


def _own_group(controller: str) -> Path:
    """The group of this process in a hierarchy of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found = _ROOT / controller / path.lstrip("/")
            # in a container the path may be the host's
            return found if found.is_dir() else _ROOT / controller
    raise FileNotFoundError(f"the kernel has no controller {controller}")


def _sweep(parent: Path) -> None:
    for path in parent.glob(_NAME.format("*", "*")):
        pid = path.name.split("-")[2]
        if not Path("/proc", pid).exists():
            with suppress(OSError):
                path.rmdir()
