"""Checkouts, other users of the machine, and processes in mount namespaces of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkout_parts import ROOT_PEER, running_service
from daemons import Daemon, daemon
from gitrepos import ENV, Upstream
from mount_table import mount_lines
from waiting import until

from mirrord.config import Settings
from mirrord.doctor.service import binds
from mirrord.errors import BackendUnavailableError
from mirrord.host.mount_tables import find_left_behind
from mirrord.host.peers import Peer
from mirrord.model import Backend
from mirrord.protocol import Checkout, StartCheckout

OWNER, OTHER, NOBODY = 12345, 23456, 65534
BACKENDS = ("overlay", "pool")

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on this machine"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "r")
    for number in range(3):
        upstream.commit({"README": f"{number}\n", "src/main.py": f"print({number})\n"})
        upstream.git("tag", f"v{number}")
    text = '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[checkouts]\nprewarm = false\n'
    with daemon(f'{text}[access]\ngroup = "{OWNER}"\ncommits = "any"\n') as made:
        operation = made.json("POST", "/v1/mirrors", {"repo": "o/r", "url": upstream.url})
        while operation["state"] == "running":
            time.sleep(0.05)
            operation = made.json("GET", f"/v1/operations/{operation['id']}")
        yield made


@contextmanager
def held(running: Daemon, **asked: Any) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = running.json("POST", "/v1/checkouts", {"instance": "o__r@v1", **asked})
    assert "id" in made, made
    try:
        yield made
    finally:
        assert running.request("DELETE", f"/v1/checkouts/{made['id']}")[0] == 204


# -- other users ---------------------------------------------------------------------------------

LOOKS = (
    'ls "$D"',
    'ls "$T"',
    'cat "$T/README"',
    'stat "$T/.git"',
    'cat "$T/.git/HEAD"',
    'git -C "$T" log',
    'cd "$T"',
    'cat "$T/answer"',
    (
        'for t in $(awk "index(\\$5, \\"${D%/*}\\") {print \\$5}" /proc/self/mountinfo); do'
        ' cat "$t/README" && exit 0; done; exit 1'
    ),
)


def succeeds(uid: int, checkout: dict[str, Any], script: str) -> bool:
    """Also as a user in the owner's group: only the uid counts."""
    env = {**ENV, "D": checkout["directory"], "T": checkout["path"]}
    done = subprocess.run(
        ["sh", "-c", script],
        cwd="/",
        env=env,
        user=uid,
        group=OWNER,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("uid", [OTHER, NOBODY])
def test_nobody_else_reads_a_checkout(running: Daemon, backend: str, uid: int) -> None:
    """Neither an agent's nor a grader's with the answer in it: not by its path, nor by one that the
    table of mounts tells.
    """
    with (
        held(running, backend=backend, owner=OWNER) as agents,
        held(running, backend=backend, owner=OTHER + 1) as anothers,
        held(running, backend=backend, view="grader") as graders,
    ):
        for each in (agents, anothers, graders):
            Path(each["path"], "answer").write_text("gold\n")
            Path(each["path"], "answer").chmod(0o644)
            assert Path(each["directory"]).stat().st_mode & 0o007 == 0
            assert [script for script in LOOKS if succeeds(uid, each, script)] == []
        assert succeeds(OWNER, agents, 'cat "$T/README" "$T/answer" && git -C "$T" log')
        assert succeeds(OWNER, agents, LOOKS[-1]) is (backend == "overlay")
        assert not succeeds(OWNER, graders, 'cat "$T/answer"')
        assert not succeeds(OWNER, anothers, 'cat "$T/answer"')


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkouts_directory_holds_its_tree_and_nothing_else(
    running: Daemon, backend: str
) -> None:
    """Its owner can neither list it nor put anything there, before and after a reset, which leaves
    it what it was.
    """
    with held(running, backend=backend, owner=OWNER) as made:
        assert made["path"] == f"{made['directory']}/tree"
        before = os.stat(made["directory"])
        for _ in range(2):
            assert os.listdir(made["directory"]) == ["tree"]
            for refused in (
                'ls "$D"',
                'touch "$D/new"',
                'mv "$T" "$D/other"',
                'rmdir "$T"',
                'ls "$D/../../leases"',
            ):
                assert not succeeds(OWNER, made, refused)
            assert (
                running.request("POST", f"/v1/checkouts/{made['id']}/reset", {"commit": "v2"})[0]
                == 200
            )
        assert os.stat(made["directory"]).st_ino == before.st_ino
        listed = {each["id"]: each["directory"] for each in running.json("GET", "/v1/checkouts")}
        assert listed[made["id"]] == made["directory"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_neither_set_id_bits_nor_devices_count_in_a_checkout(running: Daemon, backend: str) -> None:
    """Not even those that root in a container made there."""
    with held(running, backend=backend, owner=OWNER) as made:
        tree = Path(made["path"])
        shutil.copy("/usr/bin/id", tree / "id")
        (tree / "id").chmod(0o4755)
        subprocess.run(["mknod", "-m", "666", tree / "null", "c", "1", "3"], check=True)
        assert (tree / "id").stat().st_uid == 0
        done = subprocess.run(
            [tree / "id", "-u"],
            user=OWNER,
            group=OWNER,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(OWNER)
        with pytest.raises(PermissionError):
            (tree / "null").read_bytes()


def test_the_binds_outlive_a_daemon_that_leaves_a_lease(tmp_path: Path) -> None:
    """After a kill and after a stop, set-id bits in a checkout have no effect. A daemon that leaves no
    lease removes the binds.
    """
    upstream = Upstream(tmp_path / "r")
    upstream.commit({"README": "1\n"})
    with daemon('[audit]\ninterval = "0"\n') as it:
        checkouts = it.state_dir / "checkouts"
        operation = it.json("POST", "/v1/mirrors", {"repo": "o/r", "url": upstream.url})
        while operation["state"] == "running":
            time.sleep(0.05)
            operation = it.json("GET", f"/v1/operations/{operation['id']}")
        held = [
            it.json("POST", "/v1/checkouts", {"instance": "o__r@main", "backend": backend})
            for backend in BACKENDS
        ]
        for end in (it.kill, it.stop):
            end()
            assert os.statvfs(checkouts).f_flag & os.ST_NOSUID
            it.start()
            for made in held:
                assert Path(made["path"], "README").read_text() == "1\n"
            mounted = [line.split()[4] for line in mount_lines()]
            assert mounted.count(str(checkouts)) == 1
        for made in held:
            release(it, made)
        until(lambda: not any(it.state_dir.glob("leases/.trash-*")))
        it.stop()
        assert not os.path.ismount(checkouts)
        shutil.rmtree(it.state_dir)


# -- containers ----------------------------------------------------------------------------------


class Container:
    """A shell in a mount namespace of its own."""

    def __init__(self, propagation: str, enter: str = ":") -> None:
        command = [
            "unshare",
            "--mount",
            "--propagation",
            propagation,
            "sh",
            "-c",
            f"{enter}\nexec sh",
        ]
        self._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run(":")

    def run(self, script: str) -> str:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        print(f"{script}\necho; echo end", file=self._shell.stdin, flush=True)
        lines: list[str] = []
        while not lines or lines[-1] != "end\n":
            assert self._shell.poll() is None or lines, "the shell has ended"
            lines.append(self._shell.stdout.readline())
            assert lines[-1], f"the shell has ended: {lines}"
        return "".join(lines[:-1]).removesuffix("\n")

    def close(self) -> None:
        self._shell.communicate()

    def ask(self, running: Daemon, socket: str | None = None, **asked: Any) -> dict[str, Any]:
        """Ask for a checkout from in here."""
        body = json.dumps({"instance": "o__r@v1", **asked})
        at = socket or running.socket
        answer: dict[str, Any] = json.loads(
            self.run(
                f"curl --silent --unix-socket {at} -H content-type:application/json -d '{body}' http://m/v1/checkouts"
            )
        )
        return answer


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def entered(stack: ExitStack, propagation: str, enter: str = ":") -> Container:
    container = Container(propagation, enter)
    stack.callback(container.close)
    return container


def release(running: Daemon, made: dict[str, Any]) -> None:
    assert running.request("DELETE", f"/v1/checkouts/{made['id']}")[0] == 204


def test_who_sees_no_mounts_gets_a_plain_directory(running: Daemon, stack: ExitStack) -> None:
    """In a private namespace an overlay would silently be an empty directory; asking for one fails."""
    container = entered(stack, "private")
    made = container.ask(running)
    assert made["backend"] == "pool"
    assert container.run(f"cat {made['path']}/README") == "1\n"
    release(running, made)
    refused = container.ask(running, backend="overlay")
    assert refused["code"] == "backend-unavailable"
    assert "rslave" in refused["hint"]


@pytest.mark.parametrize("propagation", ["slave", "shared", "unchanged"])
def test_who_sees_mounts_gets_an_overlay(
    running: Daemon, stack: ExitStack, propagation: str
) -> None:
    """Another namespace alone says nothing: most units and many containers are slaves of the
    host's.
    """
    container = entered(stack, propagation)
    made = container.ask(running)
    assert made["backend"] == "overlay"
    assert container.run(f"cat {made['path']}/README") == "1\n"
    release(running, made)


def test_whose_mounts_cannot_be_read_gets_a_plain_directory(rich: Upstream) -> None:
    """A peer of another pid namespace has no number here. Unknown is no: an overlay could be an
    empty directory to it.
    """
    unknown = Peer(uid=0, gid=0, pid=0)
    with running_service(rich, with_overlay=True) as service:

        def start(backend: Backend | None, peer: Peer) -> Checkout:
            wanted = StartCheckout(instance="psf__requests@v2", backend=backend)
            return service.call(service.checkouts.checkout, wanted, peer)

        assert start(None, ROOT_PEER).backend is Backend.OVERLAY
        assert start(None, unknown).backend is Backend.POOL
        with pytest.raises(BackendUnavailableError, match="may not show") as refused:
            start(Backend.OVERLAY, unknown)
        assert refused.value.hint and "rslave" in refused.value.hint


def new_root(root: Path, running: Daemon, *binds: str) -> str:
    """A script that makes a root of its own with the programs of this machine, the socket, and
    `binds`.
    """
    return f"""
set -e
mount -t tmpfs none {root}; cd {root}; mkdir -p usr proc old work
mount --rbind /usr usr; mount --rbind /proc proc
for each in bin sbin lib lib64; do ln -s usr/$each $each; done
touch s; mount --bind {running.socket} s
{" ".join(binds)}
pivot_root . old; umount -l /old; cd /
set +e
"""


def test_a_process_that_sees_no_mounts_gets_an_error(
    running: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    """A path that leads nowhere is no answer; asking for the pool by name is: it may be for
    somebody else.
    """
    container = entered(stack, "slave", new_root(tmp_path, running))
    for asked in ({}, {"backend": "overlay"}):
        refused = container.ask(running, "/s", **asked)
        assert (refused["code"], "rslave" in refused["hint"]) == ("backend-unavailable", True)
    release(running, container.ask(running, "/s", backend="pool"))


def test_a_container_with_the_checkouts_elsewhere_gets_overlays(
    running: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    """The path does not matter."""
    bind = f"mount --rbind {running.state_dir}/checkouts work; mount --make-rslave work"
    container = entered(stack, "slave", new_root(tmp_path, running, bind))
    made = container.ask(running, "/s")
    assert made["backend"] == "overlay"
    assert container.run(f"cat /work/{made['id']}/tree/README") == "1\n"
    release(running, made)


def test_a_container_with_one_checkout_sees_no_others(
    running: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    """Its mount is of the same group as that of all checkouts, and shows only the one."""
    with held(running) as mine:
        container = entered(
            stack, "slave", new_root(tmp_path, running, f"mount --rbind {mine['directory']} work")
        )
        assert container.run("cat /work/tree/README") == "1\n"
        assert container.ask(running, "/s")["code"] == "backend-unavailable"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_container_that_mounted_a_checkout_follows_its_resets(
    running: Daemon, stack: ExitStack, tmp_path: Path, backend: str
) -> None:
    """Three of them: it reads the new tree, and what it writes is in the diff."""
    with held(running, backend=backend) as made:
        bind = f"mount --rbind {made['directory']} work; mount --make-rslave work"
        container = entered(stack, "slave", new_root(tmp_path, running, bind))
        for turn, commit in enumerate(("v2", "v0", "v1")):
            assert (
                running.request("POST", f"/v1/checkouts/{made['id']}/reset", {"commit": commit})[0]
                == 200
            )
            assert container.run("cat /work/tree/README /work/tree/.git/HEAD") == (
                Path(made["path"], "README").read_text()
                + Path(made["path"], ".git/HEAD").read_text()
            )
            assert container.run("cat /work/tree/README") == f"{commit[1]}\n"
            assert container.run(f"ls -A /work; echo {turn} >/work/tree/mine") == "tree\n"
            status, _, diff = running.request("GET", f"/v1/checkouts/{made['id']}/diff")
            assert (status, f"+{turn}\n".encode() in diff) == (200, True)


READER = 'while read -r line; do cat "$0/README"; echo "$line" >"$0/mine"; done'
# not all of `/`: it ends where any mount below goes before it is read-only
_SYSTEM = "--ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64"
BWRAP = ("bwrap", *_SYSTEM.split(), "--bind")
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--propagation")
WAYS: dict[str, tuple[tuple[str, ...], bool]] = {
    "bwrap, the directory": (
        (*BWRAP, "{D}", "/mnt/task", "sh", "-c", READER, "/mnt/task/tree"),
        True,
    ),
    "bwrap, the tree": ((*BWRAP, "{D}/tree", "/mnt/task", "sh", "-c", READER, "/mnt/task"), False),
    "unshare, a slave": ((*UNSHARE, "slave", "sh", "-c", READER, "{D}/tree"), True),
    "unshare, private": ((*UNSHARE, "private", "sh", "-c", READER, "{D}/tree"), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_an_agents_uid_binds_itself_follows_where_it_is_the_directory(
    running: Daemon, way: str
) -> None:
    """In a user namespace of its own, while it runs; a bind of the tree keeps the old tree."""
    command, follows = WAYS[way]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on this machine")
    with (
        held(running, owner=OWNER) as made,
        subprocess.Popen(
            [word.replace("{D}", made["directory"]) for word in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            user=OWNER, group=OWNER, extra_groups=[],
        ) as inside,
    ):  # fmt: skip

        def asked(line: str) -> tuple[str, bool]:
            """Return what it reads, and whether its writes reach the checkout."""
            assert inside.stdin is not None
            assert inside.stdout is not None
            print(line, file=inside.stdin, flush=True)
            read = inside.stdout.readline()
            print("again", file=inside.stdin, flush=True)
            inside.stdout.readline()  # the first line is written by now
            return read, Path(made["path"], "mine").exists()

        assert asked("one") == ("1\n", True)
        for commit in ("v2", "v0"):
            path = f"/v1/checkouts/{made['id']}/reset"
            assert running.request("POST", path, {"commit": commit})[0] == 200
            assert asked(commit) == ((f"{commit[1]}\n", True) if follows else ("1\n", False))


def test_the_doctor_names_binds_that_resets_do_not_reach(
    running: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    """A mount without propagation, and after a reset a mount of the tree; not one of the directory."""
    with held(running) as made:
        root = tmp_path / "root"
        root.mkdir()
        ways = {
            "followed": f"mount --rbind {made['directory']} {root}; mount --make-rslave {root}",
            "tree": f"mount --bind {made['path']} {root}",
            "private": f"mount --rbind {made['directory']} {root}; mount --make-rprivate {root}",
        }
        inside = {
            name: entered(stack, "slave", bind).run("echo $$").strip()
            for name, bind in ways.items()
        }
        assert running.request("POST", f"/v1/checkouts/{made['id']}/reset", {})[0] == 200
        lost = find_left_behind(running.state_dir / "checkouts")
        assert lost[int(inside["tree"])] == str(root)
        assert lost[int(inside["private"])] == f"{root}/tree"
        assert int(inside["followed"]) not in lost
    verdict, _, remedy = binds(Settings.model_validate({"state_dir": running.state_dir}))
    assert (verdict, "attach --pid" in remedy) == ("warn", True)


def test_another_namespace_is_looked_at_once_for_a_connection(
    running: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    """Three checkouts over one connection read the tables of mounts once; those of our own
    namespace never do.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not on this machine")
    container = entered(stack, "private")
    trace = tmp_path / "trace"
    # Checkouts of earlier tests are taken down, which looks at mounts too.
    until(lambda: not any(running.state_dir.glob("leases/.trash-*")))
    command = ["strace", "-f", "-o", str(trace), "-e", "trace=openat", "-p", str(running.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:
        assert tracer.stderr is not None
        assert b"attached" in tracer.stderr.readline()
        body = json.dumps({"instance": "o__r@v1"})
        once = f"--unix-socket {running.socket} -H content-type:application/json -d '{body}' http://m/v1/checkouts"
        said = container.run(f"curl --silent {' --next --silent '.join([once] * 3)}")
        running.json("GET", "/v1/checkouts")
        release(running, running.json("POST", "/v1/checkouts", {"instance": "o__r@v1"}))
        tracer.terminate()
        tracer.communicate()
    assert said.count('"backend":"pool"') == 3
    # ours is read too, to compare it with theirs, and by what removes checkouts of other tests
    assert len(re.findall(r"/proc/\d+/mountinfo", trace.read_text())) == 1
    for made in running.json("GET", "/v1/checkouts"):
        release(running, made)
