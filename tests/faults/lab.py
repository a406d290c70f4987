"""A daemon with something to lose, and a memory of its own of what the daemon said is safe.

The lab knows the truth because it made the upstream and wrote down every answer. `judge.py` compares.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemons import Daemon, unmount_below
from gitrepos import Upstream, git
from waiting import BOUND_S

NAME = "o__r"
CONFIG = """[upstream]
url = "file://{upstreams}/{{owner}}__{{name}}"
[sync]
interval = "0"
[checkouts]
prewarm = false
disk_reserve = "0B"
[access]
commits = "any"
group = "nogroup"
"""
_OPERATION_S = 60.0


class Refused(Exception):
    """The daemon answered with a problem."""

    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(f"{problem.get('code')}: {problem.get('detail')}")
        self.code = str(problem.get("code"))
        self.problem = problem

    @property
    def is_bug(self) -> bool:
        """Whether mirrord says that it did not expect this."""
        return self.code == "internal"


@dataclass
class Truth:
    """What the daemon said, and must stand by: pins (commit, owner), tips that a sync brought, leases with their commit."""

    pins: set[tuple[str, str]] = field(default_factory=set)
    tips: set[str] = field(default_factory=set)
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)


class Lab:
    """One upstream, one daemon. `state` may be a mount point."""

    def __init__(self, root: Path, commits: int = 24) -> None:
        self.root = root
        (root / "up").mkdir()
        self.upstream = Upstream(root / "up" / NAME)
        self.upstream.commit({f"lib/f{n}.txt": os.urandom(3000).hex() for n in range(60)}, "large")
        self.commits = self.upstream.history(commits)
        self.upstream.git("tag", "v1", self.commits[3])
        self.daemon = Daemon(root, CONFIG.format(upstreams=root / "up"))
        self.truth = Truth()
        self._numbers = iter(range(1, 1_000_000))

    @property
    def state(self) -> Path:
        return self.daemon.state_dir

    @property
    def mirror(self) -> Path:
        return self.state / "mirrors" / NAME

    def number(self) -> int:
        """Another one each time, for names."""
        return next(self._numbers)

    # -- asking the daemon ----------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer; raises Refused for a problem and OSError where there is no daemon, or no longer."""
        status, _, content = self.daemon.request(method, f"/v1/{path}", body)
        answer = json.loads(content) if content else None
        if status >= 400:
            raise Refused(answer or {})
        return answer

    def finish(self, operation: dict[str, Any]) -> dict[str, Any]:
        """Wait for an operation; its result, or Refused with its error."""
        deadline = time.monotonic() + _OPERATION_S
        while operation["state"] == "running":
            assert time.monotonic() < deadline, f"{operation['kind']} does not end: {operation}"
            time.sleep(0.01)
            operation = self.call("GET", f"operations/{operation['id']}")
        if operation["state"] != "done":
            raise Refused(operation["error"] or {"code": operation["state"]})
        return operation["result"] or {}

    def sync(self) -> None:
        result = self.finish(self.call("POST", f"mirrors/{NAME}/sync"))
        if result["faults"]:  # a fetch that dies is told as refs that could not be had
            raise Refused({"code": "ref-faults", "detail": str(result["faults"])})
        self.truth.tips |= set(self.offered().values())

    def offered(self) -> dict[str, str]:
        """What upstream has now."""
        return refs_of(self.upstream.path, "refs/heads", "refs/tags")

    def import_rows(self, dataset: str, commits: list[str], repo: str = "o/r") -> None:
        rows = [
            {"instance_id": f"{dataset}-{commit[:12]}", "repo": repo, "base_commit": commit}
            for commit in commits
        ]
        text = "".join(json.dumps({**row, **_ROW}) + "\n" for row in rows)
        self.finish(
            self.call("POST", f"datasets?filename={dataset}.jsonl&name={dataset}", text.encode())
        )
        if repo != "o/r":
            return
        owner = f"dataset/{dataset}"
        self.truth.pins = {pin for pin in self.truth.pins if pin[1] != owner} | {
            (commit, owner) for commit in commits
        }

    def checkout(self, commit: str, backend: str, **more: str) -> dict[str, Any]:
        wanted = {"mirror": NAME, "commit": commit, "backend": backend, **more}
        made: dict[str, Any] = self.call("POST", "checkouts", wanted)
        self.truth.leases[made["id"]] = made
        return made

    def release(self, lease: str) -> None:
        self.truth.leases.pop(lease, None)  # from here on it may be gone
        self.call("DELETE", f"checkouts/{lease}")

    def maintain(self) -> None:
        """Have the schedule maintain now, which it does an eighth of the interval after the start."""
        (self.mirror / "mirrord-repacked").unlink(missing_ok=True)
        before = {operation["id"] for operation in self.call("GET", "operations")}
        try:
            self._set_maintenance('interval = "1s"')
            self.finish(self._new_operation("mirror.maintain", before))
        finally:
            self._set_maintenance("")

    def _set_maintenance(self, text: str) -> None:
        self.daemon.write_config(
            CONFIG.format(upstreams=self.root / "up") + f"[maintenance]\n{text}\n"
        )
        self.call("POST", "reload")

    def _new_operation(self, kind: str, before: set[str]) -> dict[str, Any]:
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            for operation in self.call("GET", "operations"):
                if (
                    operation["kind"] == kind
                    and operation["id"] not in before
                    and operation["subject"] == NAME
                ):
                    return dict(operation)
            time.sleep(0.01)
        raise AssertionError(f"{kind} did not begin")

    # -- a beginning, and an end ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """A mirror with a dataset, a pin and a checkout of each backend."""
        self.finish(self.call("POST", "mirrors", {"repo": "o/r"}))
        self.truth.tips |= set(self.offered().values())
        self.import_rows("base", self.commits[:6])
        self.call("POST", "pins", {"mirror": NAME, "commit": self.commits[7], "reason": "mine"})
        self.truth.pins.add((self.commits[7], "person/0"))
        for backend in ("overlay", "pool"):
            made = self.checkout(self.commits[2], backend)
            (Path(made["path"]) / "work").write_text("the owner's\n")

    def bugs(self) -> list[str]:
        """The ends of the tracebacks in the daemon's log."""
        return [
            part.strip()[-600:]
            for part in self.daemon.log.split("Traceback (most recent call last)")[1:]
        ]

    def kill(self) -> None:
        """SIGKILL, however the daemon fares."""
        with suppress(ProcessLookupError):
            os.kill(self.daemon.pid, signal.SIGKILL)

    @property
    def is_up(self) -> bool:
        return self.daemon.process is not None and self.daemon.process.poll() is None

    def wait_for_end(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.wait(BOUND_S)

    def restart(self, **how: Any) -> None:
        """Start again after a kill, at once: what the dead daemon's children still do is part of the fault."""
        self.wait_for_end()
        self.daemon.start(**how)


_ROW = {
    "patch": "",
    "test_patch": "",
    "problem_statement": "p",
    "hints_text": "",
    "created_at": "2020-01-01T00:00:00Z",
    "version": "1",
    "FAIL_TO_PASS": "[]",
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": None,
}


def refs_of(repository: Path, *prefixes: str) -> dict[str, str]:
    listing = git(repository, "for-each-ref", "--format=%(refname) %(objectname)", *prefixes)
    return dict(line.split() for line in listing.splitlines())


class Background:
    """Work on the daemon in a thread. `error` is how it ended, None where it went well."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(90)
        assert not self._thread.is_alive(), "a request does not end"

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


@contextmanager
def laboratory(
    mount: Callable[[Path], None] | None = None, unmount: Callable[[Path], None] | None = None
) -> Iterator[Lab]:
    """A lab whose daemon was started and has something to lose; all of it is gone at the end. `mount` puts a disk below it."""
    root = Path(tempfile.mkdtemp(prefix="mf-"))
    root.chmod(0o755)
    lab = Lab(root)
    try:
        lab.state.mkdir()
        if mount:
            mount(lab.state)
        lab.daemon.start()
        lab.prepare()
        yield lab
    finally:
        close(lab, unmount)


def close(lab: Lab, unmount: Callable[[Path], None] | None) -> None:
    """Take everything away, whatever happened before."""
    if lab.daemon.process is not None:
        lab.kill()
        lab.daemon.process.wait(BOUND_S)
        lab.daemon.process = None
    unmount_below(lab.root)
    if unmount:
        unmount(lab.state)
    shutil.rmtree(lab.root, ignore_errors=True)
