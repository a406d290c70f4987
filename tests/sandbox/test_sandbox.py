"""Sandboxes of a real daemon's checkouts, as root for an agent's uid, as a user, for a subordinate uid."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from accounts import accounts
from anyone import python
from checkout_parts import passable_directory
from daemons import Daemon, daemon
from forgedtar import END, ROOT, sparse
from gitrepos import Upstream
from procsearch import command as search
from sandbox_here import needs_sandbox
from waiting import BOUND_S, until

import mirrord
from mirrord import Executed, Sandbox
from mirrord.sandbox import room
from mirrord.sandbox.calls import OUTPUT_BYTES, Output

pytestmark = [
    pytest.mark.root,
    needs_sandbox,
]

GROUP = 1  # daemon, on every Debian
AGENT, MEMBER, SUBUID, SUBGID = 34591, 34592, 230003, 430003
SERVER = "python3 -m http.server 8000"
ASK = "import urllib.request as u; print(u.urlopen('http://localhost:8000/README').read())"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "r")
    for number in range(3):
        upstream.commit({"README": f"{number}\n", "src/main.py": f"print({number})\n"})
        upstream.git("tag", f"v{number}")
    text = '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[checkouts]\nprewarm = false\n'
    with daemon(start=False) as made:
        made.write_config(f'{text}[access]\ngroup = "daemon"\ncommits = "any"\n')
        place_environment(made.root / "state")
        made.start()
        operation = made.json("POST", "/v1/mirrors", {"repo": "o/r", "url": upstream.url})
        while operation["state"] == "running":
            time.sleep(0.05)
            operation = made.json("GET", f"/v1/operations/{operation['id']}")
        yield made


def place_environment(state: Path) -> None:
    """As a build would have left it: a virtual environment of the host's Python."""
    place = state / "templates/.environments" / ("ab" * 32)
    place.mkdir(parents=True)
    command = ["/usr/bin/python3", "-m", "venv", "--without-pip", str(place / "files")]
    subprocess.run(command, check=True)
    facts = {"key": "plain", "digest": place.name, "state": "ready", "at": 0}
    (place / "environment.json").write_text(json.dumps(facts))


@pytest.fixture
def client(running: Daemon) -> Iterator[mirrord.Client]:
    with mirrord.Client(running.socket) as made:
        yield made


@pytest.fixture(params=["overlay", "pool"])
def checkout(client: mirrord.Client, request: pytest.FixtureRequest) -> Iterator[mirrord.Checkout]:
    """An agent's, as root takes it."""
    with client.checkout("o__r@v1", owner=AGENT, backend=request.param) as made:
        yield made


@pytest.fixture
def overlay(client: mirrord.Client) -> Iterator[mirrord.Checkout]:
    with client.checkout("o__r@v1", owner=AGENT) as made:
        yield made


def sleeping(seconds: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parts[2]] if path.read_bytes() == f"sleep\0{seconds}\0".encode() else []
        except OSError:
            continue
    return found


# -- commands --------------------------------------------------------------------------------------


def test_commands_of_a_sandbox_share_home_tmp_and_what_runs(overlay: mirrord.Checkout) -> None:
    """A server that one command leaves behind answers the next, and may print as long as it likes."""
    with Sandbox(overlay, variables={"A": "a b"}) as sandbox:
        assert sandbox.exec(f"{SERVER} & echo x >/tmp/x; echo y >~/y").exit_code == 0
        until(lambda: sandbox.exec(["python3", "-c", ASK]).exit_code == 0)
        assert sandbox.exec(["python3", "-c", ASK]).stdout == b"b'1\\n'\n"
        found = sandbox.exec(
            'cat /tmp/x ~/y; echo "$A $B"; pwd; id -u; echo e >&2; cat; exit 3',
            cwd="src",
            variables={"B": "c'd"},
            input=b"\0\xff" * 100_000,
        )
    assert found.stdout == f"x\ny\na b c'd\n/testbed/src\n{AGENT}\n".encode() + b"\0\xff" * 100_000
    assert (found.exit_code, found.stderr, found.struck) == (3, b"e\n", None)
    until(lambda: not _runs("http.server"))


def test_a_clone_in_a_sandbox_comes_from_its_tree(overlay: mirrord.Checkout) -> None:
    """Of the forge's URL too, where no forge can be reached; in a login shell as well."""
    clone = "git clone -q https://github.com/o/r /tmp/r && git -C /tmp/r log --format=%D"
    with Sandbox(overlay) as sandbox:
        found = sandbox.exec(["bash", "-lc", clone])
        assert (found.stderr, found.stdout.count(b"tag: v")) == (b"", 2)
        assert b"checkout of o/r" in sandbox.exec("git ls-remote https://github.com/o/x").stderr
    with Sandbox(overlay, network=True) as sandbox:
        assert sandbox.exec("git ls-remote mirrord::o/r").exit_code == 0
        assert sandbox.exec("git config --get-regexp 'url.*'").exit_code == 1


def test_git_commits_in_a_sandbox(overlay: mirrord.Checkout) -> None:
    """By somebody without a name. An agent's own configuration comes first; after a reset the
    repository is sealed.
    """
    work = "echo x >>README && git stash -q && git stash pop -q && git commit -qam x && git tag -a v -m v && git notes add -m n"
    work += (
        " && git checkout -qb o HEAD~1 && echo o >o && git add o && git commit -qm o"
        " && git merge -q --no-edit v && git checkout -qb p HEAD~1 && git rebase -q v"
    )
    ask = "git log -1 --format=%an.%ce && git config --global user.name me && git var GIT_AUTHOR_IDENT"
    for network in (False, True):
        with Sandbox(overlay, network=network) as sandbox:
            done = sandbox.exec(f"{work} && {ask}")
            assert (done.exit_code, done.stderr) == (0, b"")
            author, mine = done.stdout.decode().splitlines()
            assert (author, mine.split()[0]) == ("testbed.testbed@localhost", "me")
            sandbox.reset()
    words = ["verify-seal", str(overlay.path), "--base", overlay.commit]
    sealed = subprocess.run([sys.executable, "-m", "mirrord", *words], check=False)
    assert sealed.returncode == 0


def _runs(text: str) -> bool:
    command = ["pgrep", "--uid", str(AGENT), "--full", text]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_sandboxes_that_start_at_once_have_one_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a second one would end with it, and with the thread its sandbox."""
    met = threading.Barrier(2)

    class Slow(ThreadPoolExecutor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            met.wait(BOUND_S)

    monkeypatch.setattr(room, "_starters", {})
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", Slow)
    with ThreadPoolExecutor(2) as callers:
        one, other = callers.map(room._starter, [1, 1])
    assert one is other


def test_a_sequence_needs_no_shell_and_what_cannot_run_has_its_status(
    overlay: mirrord.Checkout,
) -> None:
    with Sandbox(overlay) as sandbox:
        assert sandbox.exec(["printf", "%s.", "$HOME", "a b"]).stdout == b"$HOME.a b."
        assert sandbox.exec(["no-such-command"]).exit_code == 127
        assert sandbox.exec(["true"], cwd="/nowhere").exit_code == 126
        assert sandbox.exec("kill -TERM $$").exit_code == 128 + signal.SIGTERM
        with pytest.raises(mirrord.UsageError, match="cannot set variable 'a;b'"):
            sandbox.exec("true", variables={"a;b": ""})


def test_of_a_long_output_the_ends_are_kept(overlay: mirrord.Checkout) -> None:
    with Sandbox(overlay) as sandbox:
        found = sandbox.exec(f"echo first; head -c {OUTPUT_BYTES + 1000} /dev/zero; echo last")
    assert found.stdout.startswith(b"first\n")
    assert found.stdout.endswith(b"last\n")
    assert b"\n[mirrord: 1011 bytes left out here]\n" in found.stdout
    assert len(found.stdout) < OUTPUT_BYTES + 100


def test_output_is_the_same_however_it_comes() -> None:
    for step in (1, 3, 50):
        text, output = bytes(range(100)), Output(20)
        for start in range(0, 100, step):
            output.write(text[start : start + step])
        mark = b"\n[mirrord: 80 bytes left out here]\n"
        assert output.bytes() == text[:10] + mark + text[90:]


# -- resets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the sandbox", "its checkout", "another"])
def test_after_a_reset_the_next_command_sees_the_new_tree_and_none_of_the_old_processes(
    running: Daemon, overlay: mirrord.Checkout, by: str
) -> None:
    """Whoever asked for the reset."""
    seconds = f"4{os.getpid()}"
    with Sandbox(overlay) as sandbox:
        sandbox.exec(f"echo agent >>README; touch new /tmp/x; sleep {seconds} &")
        if by == "the sandbox":
            sandbox.reset(commit="v2")
            assert not sleeping(seconds)
        elif by == "its checkout":
            overlay.reset(commit="v2")
        else:
            answer = running.request("POST", f"/v1/checkouts/{overlay.id}/reset", {"commit": "v2"})
            assert answer[0] == 200
        assert sandbox.exec("cat README; ls; ls /tmp").stdout == b"2\nREADME\nsrc\n"
        assert not sleeping(seconds)
        sandbox.exec("echo more >>README")
    assert b"+more" in overlay.diff()


def test_an_environment_is_a_sandboxs_own_until_the_next_reset(client: mirrord.Client) -> None:
    """Of what an agent installs nothing is in another checkout, or in its own after a reset."""
    install = (
        "echo x = 1 >$(python -c 'import site; print(site.getsitepackages()[0])')/installed.py"
    )
    with (
        client.checkout("o__r@v1", owner=AGENT, environment="plain") as one,
        client.checkout("o__r@v1", owner=AGENT + 1, environment="plain") as two,
        Sandbox(one) as first,
        Sandbox(two) as second,
    ):
        prefix = first.exec(["python", "-c", "import sys; print(sys.prefix)"])
        assert prefix.stdout == b"/opt/miniconda3/envs/testbed\n"
        assert first.exec(f"conda activate testbed && {install}").exit_code == 0
        assert first.exec(["python", "-c", "import installed"]).exit_code == 0
        assert second.exec(["python", "-c", "import installed"]).exit_code == 1
        one.reset()
        assert first.exec(["python", "-c", "import installed"]).exit_code == 1
        assert first.exec("source /opt/miniconda3/bin/activate; python -V").exit_code == 0


def test_a_sandbox_names_its_environment_or_brings_one(client: mirrord.Client) -> None:
    """One of the caller's own may be shared by many sandboxes: nobody writes to it."""
    taken = client.checkout("o__r@v1", owner=AGENT, environment="plain")
    with taken as checkout, passable_directory() as own:
        (own / "bin").mkdir()
        (own / "bin/greet").write_text("#!/bin/sh\necho hello\n")
        (own / "bin/greet").chmod(0o755)
        os.chown(own / "bin", AGENT, AGENT)
        with Sandbox(checkout, environment="plain") as box:
            found = box.exec("command -v python").stdout
            assert found == b"/opt/miniconda3/envs/testbed/bin/python\n"
        with Sandbox(checkout, environment=own) as box:
            assert box.exec("greet").stdout == b"hello\n"
            assert box.exec("touch $VIRTUAL_ENV/bin/x").exit_code == 1
        with pytest.raises(mirrord.errors.UsageError, match="the checkout has plain@"):
            Sandbox(checkout, environment="other")
        with pytest.raises(mirrord.errors.PathNotFoundError):
            Sandbox(checkout, environment=own / "bin")


def test_a_pool_tree_is_reset_in_its_place(client: mirrord.Client) -> None:
    with (
        client.checkout("o__r@v1", owner=AGENT, backend=mirrord.Backend.POOL) as checkout,
        Sandbox(checkout) as sandbox,
    ):
        sandbox.exec("echo agent >>README")
        checkout.reset(commit="v2")
        assert sandbox.exec("cat README; echo x >>README").stdout == b"2\n"
        assert b"+x" in checkout.diff()


def test_a_released_checkout_is_named(client: mirrord.Client) -> None:
    with client.checkout("o__r@v1", owner=AGENT) as checkout, Sandbox(checkout) as sandbox:
        sandbox.exec("true")
        checkout.release()
        with pytest.raises(mirrord.CheckoutNotFoundError, match=f"checkout {checkout.id}"):
            sandbox.exec("true")


# -- limits ----------------------------------------------------------------------------------------


FORKS = """
import subprocess
begun = []
try:
    while len(begun) < 40:
        begun.append(subprocess.Popen(["sleep", "1000"]))
finally:
    for each in begun:
        each.kill()
"""


def test_each_limit_is_told_when_it_strikes(overlay: mirrord.Checkout) -> None:
    """After the time the command's processes are gone, those of other commands stay."""
    seconds = f"6{os.getpid()}"
    with Sandbox(overlay, memory_bytes=100 * 1024**2, processes=20) as sandbox:
        sandbox.exec(f"sleep {seconds} &")
        until(lambda: len(sleeping(seconds)) == 1)
        late = sandbox.exec("echo began; sleep 1000 & sleep 1000", timeout=2)
        assert late == Executed(137, b"began\n", b"", "time")
        assert len(sleeping(seconds)) == 1
        hungry = sandbox.exec(["python3", "-c", "bytearray(200 << 20)"])
        assert (hungry.exit_code, hungry.struck) == (137, "memory")
        forks = sandbox.exec(["python3", "-c", FORKS])
        assert forks.struck == "processes"
        assert sandbox.exec("true").struck is None
    assert not sleeping(seconds)
    assert not list(Path("/sys/fs/cgroup").rglob(f"mirrord-sandbox-{os.getpid()}-*"))


STOPPED = "for p in /proc/[0-9]*; do kill -STOP ${p#/proc/}; done"
TRACED = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for pid in filter(str.isdigit, os.listdir("/proc")):
    libc.ptrace(16, int(pid), 0, 0)
time.sleep(1000)
"""
STUBBORN = {
    "stops all": STOPPED,
    "stops its shell, then works": "trap '' TERM; kill -STOP $(pgrep -o bash); while :; do :; done",
    "traces all": ["python3", "-c", TRACED],
    "leaves its group": "setsid bash -c 'while :; do sleep 1; done' & while :; do wait; done",
}


def test_no_command_escapes_its_time(overlay: mirrord.Checkout) -> None:
    """And the next one runs, if need be in a new sandbox."""
    with Sandbox(overlay) as sandbox:
        for name, command in STUBBORN.items():
            late = sandbox.exec(command, timeout=1)
            assert (late.exit_code, late.struck) == (137, "time"), name
            assert sandbox.exec("echo next").stdout == b"next\n", name
        sandbox.close()
        assert not _runs("sleep")


AS_MEMBER = """
import sys, mirrord
with mirrord.Client(sys.argv[1]) as client:
    owner = int(sys.argv[2]) or None
    with client.checkout("o__r@v1", owner=owner) as checkout:
        with mirrord.Sandbox(checkout, memory_bytes=100 << 20, processes=20) as sandbox:
            first = sandbox.exec("id -u; id -g; cat README; echo x >>README")
            hungry = sandbox.exec(["python3", "-c", "bytearray(200 << 20)"])
            forks = sandbox.exec(["python3", "-c", sys.argv[3]])
            late = sandbox.exec("sleep 1000", timeout=0.2)
            sandbox.write("src/a", b"written")
            assert sandbox.read("src/a") == b"written"
            assert b"+x" in checkout.diff()
            checkout.reset()
            assert sandbox.exec("cat README").stdout == b"1\\n"
            print(first.stdout.split(), b"MemoryError" in hungry.stderr, b"BlockingIOError" in forks.stderr, late.struck)
"""


@pytest.mark.parametrize("owner", [0, SUBUID])
def test_a_member_runs_sandboxes_for_itself_and_its_subordinate_uids(
    running: Daemon, owner: int
) -> None:
    """Without a control group each process meets its limit by itself."""
    with accounts(
        passwd=f"mirrord-sandbox:x:{MEMBER}:{MEMBER}::/:/bin/sh",
        subuid=f"{MEMBER}:230000:10",
        subgid=f"{MEMBER}:430000:10",
    ):
        done = subprocess.run(
            [*python(), "-c", AS_MEMBER, str(running.socket), str(owner), FORKS],
            user=MEMBER, group=MEMBER, extra_groups=[GROUP], cwd="/",
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    uid, gid = (SUBUID, SUBGID) if owner else (MEMBER, MEMBER)
    ids = [str(each).encode() for each in (uid, gid, 1)]
    assert done.stdout == f"{ids} True True time\n", done.stderr


# -- ends ------------------------------------------------------------------------------------------

HELD = """
import sys, mirrord
with mirrord.Client(sys.argv[1]) as client, client.checkout("o__r@v1", owner=int(sys.argv[2])) as checkout:
    with mirrord.Sandbox(checkout) as sandbox:
        sandbox.exec(f"setsid sleep {sys.argv[3]} & setsid bash -c 'trap : TERM INT HUP; sleep {sys.argv[3]}' &")
        print("began", flush=True)
        sandbox.exec(f"sleep {sys.argv[3]}")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_is_left_of_a_client_that_was_ended(
    running: Daemon, number: signal.Signals
) -> None:
    seconds = f"7{os.getpid()}"
    arguments = [str(running.socket), str(AGENT), seconds]
    with subprocess.Popen(
        [sys.executable, "-c", HELD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"began\n"
        until(lambda: len(sleeping(seconds)) == 3)
        held.send_signal(number)
    until(lambda: not sleeping(seconds))


def test_a_sandbox_outlives_the_thread_that_began_it(overlay: mirrord.Checkout) -> None:
    """The kernel ties a process to a thread, not to a process."""
    with Sandbox(overlay) as sandbox:
        thread = threading.Thread(target=sandbox.exec, args=("echo x >/tmp/x",))
        thread.start()
        thread.join()
        time.sleep(0.1)
        assert sandbox.exec("cat /tmp/x").stdout == b"x\n"


def test_a_command_may_end_its_sandbox_and_the_next_begins_again(
    overlay: mirrord.Checkout,
) -> None:
    """Nor does an agent that writes in the place of the shell harm anybody but itself."""
    with Sandbox(overlay) as sandbox:
        assert sandbox.exec("kill -KILL -1").exit_code == 137
        forged = "for f in /proc/[0-9]*/cmdline; do :; done; for n in $(ps -eo args | grep -oE '[0-9a-f]{16}'); do"
        sandbox.exec(f"{forged} yes x | head -c 100000 >/run/mirrord/$n.end; done", timeout=2)
        assert sandbox.exec("echo again").stdout == b"again\n"


def test_a_cancelled_task_ends_its_command_alone(running: Daemon) -> None:
    seconds = f"8{os.getpid()}"

    async def work() -> bytes:
        async with (
            mirrord.AsyncClient(running.socket) as client,
            client.checkout("o__r@v1", owner=AGENT) as checkout,
            mirrord.AsyncSandbox(checkout) as sandbox,
        ):
            await sandbox.exec("echo kept >/tmp/x")
            task = asyncio.create_task(sandbox.exec(f"sleep {seconds}"))
            await asyncio.to_thread(until, lambda: sleeping(seconds))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not sleeping(seconds)
            return (await sandbox.exec("cat /tmp/x")).stdout

    assert asyncio.run(work()) == b"kept\n"


def test_sixty_four_sandboxes_run_at_once(running: Daemon) -> None:
    """More than an event loop has threads for; each has a tree of its own, all one environment."""

    async def one(client: mirrord.AsyncClient, number: int) -> bytes:
        async with (
            client.checkout("o__r@v1", owner=AGENT + 100 + number, environment="plain") as checkout,
            mirrord.AsyncSandbox(checkout) as sandbox,
        ):
            await sandbox.exec(f"echo {number} >README")
            barrier.append(number)
            while len(barrier) < 64:
                await asyncio.sleep(0.05)
            return (
                await sandbox.exec("cat README; python -c 'import os; print(os.getuid())'")
            ).stdout

    async def work() -> list[bytes]:
        async with mirrord.AsyncClient(running.socket) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    barrier: list[int] = []
    assert asyncio.run(work()) == [f"{n}\n{AGENT + 100 + n}\n".encode() for n in range(64)]


# -- files -----------------------------------------------------------------------------------------


def test_files_go_in_and_come_out(checkout: mirrord.Checkout, tmp_path: Path) -> None:
    """With both backends; a directory with links and programs, and one file."""
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/run").write_bytes(b"#!/bin/sh\necho ran\n")
    (tmp_path / "in/deep/run").chmod(0o755)
    (tmp_path / "in/link").symlink_to("deep/run")
    with Sandbox(checkout) as sandbox:
        sandbox.write("new/dir/file", b"\0content")
        assert sandbox.read("/testbed/new/dir/file") == b"\0content"
        assert os.stat(checkout.path / "new/dir/file").st_uid == AGENT
        sandbox.upload(tmp_path / "in", "/tmp/there")
        sandbox.upload(tmp_path / "in/link", "one")
        assert sandbox.exec("/tmp/there/link; ./one; ln /tmp/there/deep/run /tmp/there/hard").stdout == b"ran\nran\n"  # fmt: skip
        sandbox.download("/tmp/there", tmp_path / "out")
        sandbox.download("/tmp/there/link", tmp_path / "file")
        with pytest.raises(mirrord.PathNotFoundError, match="cannot read none in a sandbox"):
            sandbox.read("none")
        with pytest.raises(mirrord.UsageError, match="cannot download"):
            sandbox.download("/tmp/there", tmp_path / "out")
    checkout.upload(tmp_path / "in", "alone")
    checkout.download("alone/deep", tmp_path / "deep")
    checkout.write("alone/made/file", (tmp_path / "deep/run").read_bytes())
    assert checkout.read("/testbed/alone/made/file") == b"#!/bin/sh\necho ran\n"
    names = sorted(
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")
    )
    assert names == ["deep", "deep/run", "hard", "link"]
    assert subprocess.check_output([tmp_path / "out/hard"]) == b"ran\n"
    assert os.readlink(tmp_path / "out/link") == "deep/run"
    assert (tmp_path / "file").read_bytes().startswith(b"#!")


def test_an_agents_links_lead_nowhere_outside(overlay: mirrord.Checkout, tmp_path: Path) -> None:
    """Though root reads and writes."""
    secret = tmp_path / "secret"
    secret.write_text("gold")
    with Sandbox(overlay) as sandbox:
        sandbox.exec(f"ln -s {secret} file; ln -s {tmp_path} directory; mkfifo pipe")
        for path in ("file", "directory/secret", "/proc/1/root" + str(secret)):
            with pytest.raises(mirrord.PathNotFoundError):
                sandbox.read(path)
        with pytest.raises(mirrord.PathNotFoundError):
            sandbox.write("directory/new", b"x")
        sandbox.exec("rm -r file directory; mkdir -p d; ln -s /etc d/etc; mkfifo d/pipe")
        sandbox.download("d", tmp_path / "out")
        assert os.listdir(tmp_path / "out") == ["etc"]
    assert secret.read_text() == "gold"
    assert json.dumps(sorted(os.listdir(tmp_path))) == '["out", "secret"]'


def test_a_forged_archive_writes_nothing(client: mirrord.Client, tmp_path: Path) -> None:
    """By a tar of the agent's own, which comes first in its environment."""
    taken = client.checkout("o__r@v1", owner=AGENT, environment="plain")
    with taken as checkout, Sandbox(checkout) as sandbox:
        sandbox.write("forged", ROOT + sparse() + END)
        sandbox.exec(
            "printf '#!/bin/sh\\ncat /testbed/forged\\n' >$VIRTUAL_ENV/bin/tar; chmod +x $VIRTUAL_ENV/bin/tar"
        )
        with pytest.raises(mirrord.LimitReachedError, match=r"cannot download src: .* type 'S'"):
            sandbox.download("src", tmp_path / "out")
    assert os.listdir(tmp_path) == []


# -- the harness -----------------------------------------------------------------------------------

HARNESS = """
import asyncio, json, sys, mirrord
from mirrord.integrations import open_sandbox
socket, owner, command = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
with mirrord.Client(socket) as client, client.checkout("o__r@v1", owner=owner) as checkout:
    with mirrord.Sandbox(checkout) as sandbox:
        print(sandbox.exec(command).stdout.decode(), end="")
async def later():
    async with mirrord.AsyncClient(socket) as client, client.checkout("o__r@v1", owner=owner) as checkout:
        async with mirrord.AsyncSandbox(checkout) as sandbox:
            print((await sandbox.exec(command)).stdout.decode(), end="")
    async with open_sandbox("o__r@v1", socket=socket, checkout={"owner": owner}) as sandbox:
        print((await sandbox.exec(command)).stdout.decode(), end="")
asyncio.run(later())
"""


def test_nothing_of_a_harness_is_readable_in_its_sandboxes(running: Daemon, tmp_path: Path) -> None:
    """Of both clients, and of adapters, which open theirs in one place."""
    words = [f"canary-{part}-{os.getpid()}" for part in ("variable", "argument", "place", "file")]
    variable, argument, place, file = words
    (tmp_path / place).mkdir()
    (tmp_path / place / file).write_text(file)
    inherited = os.open(tmp_path / place / file, os.O_RDONLY)
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.set_inheritable({inherited}, True)\n{HARNESS}",
         str(running.socket), str(AGENT), json.dumps(search(*words)), argument],
        env={**os.environ, "OPENAI_API_KEY": variable}, cwd=tmp_path / place, pass_fds=[inherited],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(inherited)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["where"] for answer in answers] == [{}, {}, {}], done.stderr
    assert all(answer["read"] > 300 for answer in answers)
