"""A Slurm of one node on loopback ports, in a scratch directory, from Debian's packages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from waiting import BOUND_S, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONF = """\
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SwitchType=switch/none
ReturnToService=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
{more}
"""


class Slurm:
    """`home` can be entered by every user."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.conf = home / "slurm.conf"

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            command,
            env={**(env or os.environ), "SLURM_CONF": str(self.conf)},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Such as RUNNING, COMPLETING and COMPLETED."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def node_state(self) -> str:
        return self.run("sinfo", "--noheader", "--format=%T")

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.home.glob("*.log")))


@contextmanager
def slurm(more: str) -> Iterator[Slurm]:
    """Its node is idle; `more` are lines of slurm.conf. Skips where Slurm is not installed."""
    if missing := [each for each in PROGRAMS if shutil.which(each) is None]:
        pytest.skip(f"Slurm is not installed here: no {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ms-", ignore_cleanup_errors=True) as scratch:
        home = Path(scratch)
        home.chmod(0o755)
        for name in ("state", "spool"):
            (home / name).mkdir()
        key = home / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        made = Slurm(home)
        ports = {"controller": free_port(), "node": free_port()}
        host = socket.gethostname().partition(".")[0]
        made.conf.write_text(_CONF.format(host=host, home=home, more=more, **ports))
        places = {"socket": "munge", "key-file": "munge.key", "pid-file": "munge.pid"}
        places |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        options = [f"--{name}={home / place}" for name, place in places.items()]
        running: list[subprocess.Popen[bytes]] = []
        try:
            running.append(_start(home, "munged", "--foreground", *options))
            until((home / "munge").exists, told=made.logs)
            running.append(_start(home, "slurmctld", "-D", "-f", str(made.conf)))
            running.append(_start(home, "slurmd", "-D", "-f", str(made.conf)))
            until(lambda: _is_idle(made), told=made.logs)
            try:
                yield made
            finally:  # a job that a failed test left would outlive its slurmd
                made.run("scancel", "--partition=all")
                until(lambda: _is_idle(made), told=made.logs)
        finally:
            for process in reversed(running):
                process.send_signal(signal.SIGTERM)
                process.wait(BOUND_S)


def _start(home: Path, *command: str) -> subprocess.Popen[bytes]:
    with (home / f"{command[0]}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=home)


def _is_idle(made: Slurm) -> bool:
    """slurmctld needs a moment to listen."""
    try:
        return made.node_state() == "idle"
    except AssertionError:
        return False
