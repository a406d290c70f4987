"""The main job, once, as a newcomer would do it: every step is a command that the reader can type.

Starts a daemon in a scratch state directory, imports a small dataset, audits it, checks out each instance, dirties and resets it
beside git, verifies its seal, takes a whole turn with a grade, and stops. Without a network it says so and goes on with a repository it generates.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mirrord

MIRRORD = Path(sys.executable).with_name("mirrord")
FORGE = "https://github.com/{owner}/{name}.git"
# Releases of psf/requests: the commit is the task's starting point.
RELEASES = {
    "v0.14.1": "9dce7861134c60596b91dfa8eda2ff66f5c5d5e5",
    "v1.2.3": "3bb13f8fbb9d4ed1a20bd33495cdc087eb062ca0",
    "v2.0.0": "4401620111bee0a7319bf1cb4bd0852f7c854bf6",
    "v2.3.0": "6366d3dd190a9e58ca582955cddf7e2ac5f32dcc",
    "v2.9.1": "1108058626450b863d154bb74d669754b480caa4",
    "v2.18.4": "a3d7cf3f27e74c28ef30f01e9f2e483570ab042e",
    "v2.25.1": "c2b307dbefe21177af03f9feb37181a89a799fcc",
    "v2.31.0": "147c8511ddbfa5e8f71bbf5c18ede0c4ceb3bba4",
}


NEXT = """
next:  mirrord serve --detach                       # a daemon of your own (or `make deb`: a service)
       mirrord dataset import YOUR_TASKS.jsonl      # rows with repo, base_commit and instance_id
       mirrord checkout INSTANCE                    # a tree; docs/client.md has the same in Python"""


class Session:
    """A daemon on a scratch state directory, and commands sent to it. Everything printed is what a user would see."""

    def __init__(self, scratch: Path, upstream: str) -> None:
        self.scratch = scratch
        self.config = scratch / "config.toml"
        self.socket = scratch / "mirrord.sock"
        self.log = scratch / "daemon.log"
        quoted = json.dumps
        self.config.write_text(
            f"state_dir = {quoted(str(scratch / 'state'))}\nsocket = {quoted(str(self.socket))}\n"
            f'[upstream]\nurl = {quoted(upstream)}\ntimeout = "5m"\n[checkouts]\nprewarm = false\n[log]\nformat = "json"\n'
        )

    def start(self) -> None:
        print(f"\n$ mirrord serve --config {self.config} &")
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.daemon = subprocess.Popen(
                [MIRRORD, "serve", "--config", str(self.config)],
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        while self.run("status", "--json", quiet=True).returncode:
            if self.daemon.poll() is not None or time.monotonic() - began > 30:
                raise SystemExit(f"the daemon did not start:\n{self.log.read_text()}")
            time.sleep(0.05)
        print(f"  serving after {time.monotonic() - began:.2f} s, process {self.daemon.pid}")

    def stop(self) -> None:
        began = time.monotonic()
        self.daemon.send_signal(signal.SIGTERM)
        status = self.daemon.wait(timeout=30)
        print(
            f"\ndaemon stopped with status {status} after {time.monotonic() - began:.2f} s; nothing is left of {self.scratch}"
        )

    def run(self, *words: str | Path, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a verb; prints it, its answer and how long the whole command took."""
        words = tuple(map(str, words))
        began = time.monotonic()
        env = {**os.environ, "MIRRORD_SOCKET": str(self.socket)}
        done = subprocess.run(
            [MIRRORD, *words], env=env, capture_output=True, text=True, check=False
        )
        if not quiet:
            print(
                f"\n$ mirrord {shlex.join(map(str, words))}    # {time.monotonic() - began:.2f} s, exit status {done.returncode}"
            )
            print(
                "".join(f"  {line}\n" for line in (done.stdout + done.stderr).splitlines()[:24]),
                end="",
            )
        return done

    def must(self, *words: str | Path, quiet: bool = False) -> str:
        done = self.run(*words, quiet=quiet)
        if done.returncode:
            raise SystemExit(
                f"mirrord {' '.join(map(str, words))} failed with {done.returncode}: {done.stderr}{self.log.read_text()[-3000:]}"
            )
        return done.stdout


def generate(path: Path, owner: str, name: str) -> tuple[str, dict[str, str]]:
    """A small repository with four releases; answers an upstream template and the releases."""
    work = path / f"{owner}+{name}"
    work.mkdir(parents=True)
    identity = ["-c", "user.name=Demo", "-c", "user.email=demo@example.com"]
    subprocess.run(["git", "init", "-q", "-b", "main", work], check=True)
    releases = {}
    for number in range(1, 5):
        for part in range(40):
            (work / f"part{part}.py").write_text(f"value = {number * part}\n" * 30)
        subprocess.run(["git", "-C", work, "add", "-A"], check=True)
        subprocess.run(
            ["git", "-C", work, *identity, "commit", "-q", "-m", f"release {number}"], check=True
        )
        subprocess.run(["git", "-C", work, "tag", f"v{number}.0"], check=True)
        head = subprocess.run(
            ["git", "-C", work, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        )
        releases[f"v{number}.0"] = head.stdout.strip()
    return f"file://{path}/{{owner}}+{{name}}", releases


def write_dataset(path: Path, repo: str, releases: dict[str, str]) -> list[str]:
    """A dataset of the SWE-bench family: one instance a release."""
    name = repo.replace("/", "__")
    rows = [
        {"instance_id": f"{name}-{tag}", "repo": repo, "base_commit": commit}
        for tag, commit in releases.items()
    ]
    for row in rows:
        row.update(
            patch="",
            test_patch="",
            problem_statement="",
            version="",
            FAIL_TO_PASS="[]",
            PASS_TO_PASS="[]",
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["instance_id"] for row in rows]


def dirty(tree: Path) -> None:
    """What an agent leaves behind, and worse."""
    first = next(p for p in sorted(tree.iterdir()) if p.is_file())
    first.write_text("changed\n")
    (tree / "new file.txt").write_text("created\n")
    (tree / ".git/hooks").mkdir(exist_ok=True)
    (tree / ".git/hooks/post-checkout").write_text("#!/bin/sh\ntouch /tmp/owned\n")
    with (tree / ".git/config").open("a") as config:
        config.write("[core]\n\tfsmonitor = touch /tmp/owned\n")


def exercise(session: Session, instances: list[str]) -> None:
    """Check out each instance twice, dirty, diff, reset, verify and release it, beside git."""
    print(f"\n{'':28}{'mirrord, in the daemon':^36}{'git':^24}")
    columns = ("first", "again", "reset", "worktree", "reset+clean")
    print(f"{'instance':28}" + "".join(f"{name:>12}" for name in columns) + "  seal")
    for instance in instances:
        first = json.loads(session.must("checkout", instance, "--json", quiet=True))
        session.must("release", first["path"], quiet=True)
        made = json.loads(session.must("checkout", instance, "--json", quiet=True))
        tree = Path(made["path"])
        dirty(tree)
        assert "new file.txt" in session.must("diff", tree, quiet=True)
        again = json.loads(session.must("reset", tree, "--json", quiet=True))
        seal = session.run("verify-seal", tree, "--base", made["commit"], quiet=True)
        took = [sum(answer["timings"].values()) * 1000 for answer in (first, made, again)]
        took += git_times(session, made["mirror"], made["commit"])
        verdict = "sealed" if seal.returncode == 0 else f"LEAKS ({seal.returncode})"
        print(f"{instance:28}" + "".join(f"{ms:9.1f} ms" for ms in took) + f"  {verdict}")
        session.must("release", tree, quiet=True)
    print("\nfirst: the commit's template is built, as `prewarm` does in the background.")


def git_times(session: Session, mirror: str, commit: str) -> tuple[float, float]:
    """Milliseconds of git's own: `worktree add`, then `reset --hard` and `clean` of the same."""
    tree = session.scratch / "worktree"
    git = ["git", "-C", str(session.scratch / "state/mirrors" / mirror), "worktree"]
    began = time.monotonic()
    subprocess.run([*git, "add", "-f", "--detach", tree, commit], check=True, capture_output=True)
    added = time.monotonic()
    first = next(path for path in sorted(tree.iterdir()) if path.is_file() and path.suffix)
    first.write_text("changed\n")
    (tree / "new file.txt").write_text("created\n")
    dirtied = time.monotonic()
    for words in (["reset", "--hard"], ["clean", "-ffdx"]):
        subprocess.run(["git", "-C", tree, *words], check=True, capture_output=True)
    reset = time.monotonic()
    subprocess.run([*git, "remove", "--force", tree], check=True, capture_output=True)
    return (added - began) * 1000, (reset - dirtied) * 1000


def take_a_turn(session: Session, instance: str) -> None:
    """What a harness does for a task, in Python: checkout, work, diff, grade, reset, release."""
    with mirrord.Client(session.socket) as client:
        began = time.monotonic()
        with client.checkout(instance) as checkout:
            (checkout.path / "solution.py").write_text("answer = 42\n")
            patch = checkout.diff()
            with checkout.grade() as grade:
                assert (grade.path / "solution.py").is_file()
            checkout.reset()
        took = (time.monotonic() - began) * 1000
    lines = len(patch.splitlines())
    print(
        f"\na turn of {instance}: checkout, write, diff of {lines} lines, grade, reset, release:"
        f" {took:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", default=FORGE, help="URL template with {owner} and {name}")
    upstream = parser.parse_args().upstream
    with tempfile.TemporaryDirectory(prefix="mirrord-demo-") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        reachable = subprocess.run(
            [
                "git",
                "ls-remote",
                "--exit-code",
                "-q",
                upstream.replace("{owner}", "psf").replace("{name}", "requests"),
                "HEAD",
            ],
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            capture_output=True,
            check=False,
            timeout=60,
        )
        releases = RELEASES
        if reachable.returncode:
            reason = next(iter(reachable.stderr.decode().splitlines()), "git does not say why")
            print(f"no answer from {upstream}: {reason}")
            print("going on with a repository generated here")
            upstream, releases = generate(scratch / "generated", "psf", "requests")
        session = Session(scratch, upstream)
        instances = write_dataset(scratch / "demo.jsonl", "psf/requests", releases)
        session.start()
        try:
            session.must("dataset", "import", scratch / "demo.jsonl")
            session.must("audit")
            exercise(session, instances)
            take_a_turn(session, instances[-1])
            session.must("status")
        finally:
            session.stop()
    print(NEXT)


if __name__ == "__main__":
    main()
