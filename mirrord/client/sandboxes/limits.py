"""Limits of memory and processes for all that runs in a sandbox.

A control group of its own, by version 2 or 1 of the kernel's interface, where this process may make
one, which is mostly root; else limits of each process, and nothing tells when one strikes. A group
that a killed client left, empty as its processes ended with it, is removed when the next is made.
"""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NAME = "mirrord-sandbox-{}-{}"
_OWN_PROCESSES = 5  # those around a command


class Limits:
    """`before` and `inside` are the starts of a command, on the host and in the box."""

    def __init__(self, memory_bytes: int | None, processes: int | None) -> None:
        processes = processes and processes + _OWN_PROCESSES
        self.before: list[str] = []
        self.inside: list[str] = []
        self._group: _ControlGroup | None = None
        wanted = {"memory": memory_bytes, "pids": processes}
        limits = {name: limit for name, limit in wanted.items() if limit is not None}
        if not limits:
            return
        try:
            self._group = _ControlGroup(limits)
            self.before = self._group.entering()
        except OSError:
            # The kernel counts processes for each uid of a user namespace (Linux 5.14).
            options = {"memory": "data", "pids": "nproc"}
            given = [f"--{options[name]}={limit}" for name, limit in limits.items()]
            self.inside = ["prlimit", *given, "--"]

    def strikes(self) -> dict[str, int]:
        """How often each limit struck so far, `memory` and `processes`."""
        return self._group.strikes() if self._group else {}

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        if self._group:
            self._group.remove()


class _ControlGroup:
    def __init__(self, limits: dict[str, int]) -> None:
        """Raises OSError where the kernel or its mounts allow none."""
        self._limits = limits
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
        """A program that enters the group, then replaces itself by what follows."""
        enter = 'until [ "$1" = -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'
        members = [f"{path}/cgroup.procs" for path in sorted(set(self._paths.values()))]
        return ["sh", "-c", enter, "sh", *members, "--"]

    def strikes(self) -> dict[str, int]:
        events = "memory.events" if self._is_unified else "memory.oom_control"
        files = {
            "memory": ("memory", events, "oom_kill"),
            "pids": ("processes", "pids.events", "max"),
        }
        found = {}
        for controller, path in self._paths.items():
            name, file, key = files[controller]
            lines = dict(line.split() for line in (path / file).read_text().splitlines())
            found[name] = int(lines.get(key, 0))
        return found

    def remove(self) -> None:
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
