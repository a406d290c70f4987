"""The same work for root on the host and for an ordinary user's daemon in its home, by turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from measured_daemon import MIRROR, REPO, Daemon
from results import Row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
import anyone

USER = 1500  # has neither a login session nor subordinate ids
_WORKS = {
    "checkout": "warm checkout",
    "reset": "reset, 20 changed and 100 created",
    "diff": "diff of 3 changed files",
    "fork": "fork of 3 changed files",
}
_GOAL = 0.67  # at most 1.5 times as long
_VERBS = ("-P", "-m", "mirrord")


class Asker:
    """A user with a daemon; `within` are the words that show its mounts to a program."""

    def __init__(self, uid: int, area: Path, socket: Path, *within: str) -> None:
        self._uid, self._area, self._within = uid, area, within
        self._variables = {"HOME": str(area), "MIRRORD_SOCKET": str(socket)}

    def start(
        self, *words: str, stdin: int | None = None, stdout: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*anyone.python(), *words], cwd=self._area, text=True, stdin=stdin, stdout=stdout,
            env={"PATH": os.environ["PATH"], **self._variables},
            user=self._uid, group=self._uid, extra_groups=(),
        )  # fmt: skip

    def run(self, *words: str) -> float:
        """The seconds that a verb takes."""
        began = time.perf_counter()
        if status := self.start(*_VERBS, "-q", *words).wait():
            raise RuntimeError(f"mirrord {words[0]} ended with {status}")
        return time.perf_counter() - began

    @contextmanager
    def client(self, commit: str) -> Iterator[Callable[[str], str]]:
        """A process that holds a checkout, to be asked for its id, and for a work's seconds."""
        program = (str(Path(__file__).with_name("home_client.py")), MIRROR, commit)
        words = (*self._within, *anyone.python(), *program) if self._within else program
        pipe = subprocess.PIPE
        with self.start(*words, stdin=pipe, stdout=pipe) as process:
            told, answers = process.stdin, process.stdout
            assert told
            assert answers

            def ask(work: str) -> str:
                print(work, file=told, flush=True)
                if line := answers.readline():
                    return line.strip()
                raise RuntimeError(f"the client of uid {self._uid} ended")

            yield ask


def compare_home(daemon: Daemon, source: Path, commit: str, compare: Callable[..., None]) -> None:
    """Compare a user's works with those of root, whose daemon runs."""
    area = daemon.area.parent
    with ExitStack() as stack:
        user = stack.enter_context(_user(area / "home", source))
        root = Asker(0, area, daemon.socket)
        ours, theirs = (stack.enter_context(each.client(commit)) for each in (user, root))
        against = "the same by root"

        def seconds(ask: Callable[[str], str], work: str) -> float:
            return float(ask(work))

        for work, name in _WORKS.items():
            row = Row(f"{name} (uid {USER} in its home)", against, goal=_GOAL)
            compare(row, partial(seconds, ours, work), partial(seconds, theirs, work))
        row = Row(f"mirrord exec ID -- true (uid {USER} in its home)", against, goal=_GOAL)
        mine, roots = ours("id"), theirs("id")
        compare(
            row,
            partial(user.run, "exec", mine, "--", "true"),
            partial(root.run, "exec", roots, "--", "true"),
        )


@contextmanager
def _user(area: Path, source: Path) -> Iterator[Asker]:
    """An ordinary user, with a daemon that mirrors a copy of `source`: git wants it to be its own."""
    area.mkdir()
    subprocess.run(["cp", "-rH", source, area / "source"], check=True)
    socket = area / "s"
    (area / "config.toml").write_text(
        f"state_dir = {json.dumps(str(area / 'state'))}\nsocket = {json.dumps(str(socket))}\n"
        '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[maintenance]\ninterval = "0"\n'
        '[checkouts]\nprewarm = false\n[log]\nlevel = "warning"\n'
        f'[[mirror]]\nrepo = "{REPO}"\nurl = {json.dumps(f"file://{area}/source")}\n'
    )
    subprocess.run(["chown", "-R", f"{USER}:{USER}", area], check=True)
    asker = Asker(USER, area, socket, *_VERBS, "enter", "--")
    process = asker.start(*_VERBS, "serve", "--config", str(area / "config.toml"))
    try:
        while not socket.exists() and process.poll() is None:
            time.sleep(0.05)
        asker.run("mirror", "sync", REPO)
        yield asker
    finally:
        process.terminate()
        process.wait()
