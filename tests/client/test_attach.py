"""Checkouts attached in mount namespaces that were there before: by their owner, and from outside.

A real daemon, and processes in real user and mount namespaces.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyone
import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream
from mount_table import mount_lines
from volume_driver import put_environment
from waiting import until

from mirrord import Checkout, Client, errors
from mirrord.client import mounts
from mirrord.model import Backend

pytestmark = pytest.mark.root

OWNER, MEMBER, OTHER = 65534, 31001, 31002
SUBUIDS = 3_000_000
CONFIG = f'[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n[checkouts]\nprewarm = false\n[access]\ngroup = "{MEMBER}"\ncommits = "any"\n'

INHABITANT = """
import asyncio, json, os, sys
from pathlib import Path
from mirrord import AsyncClient, Client, MirrordError
async def attach_async(checkout, *places):
    async with AsyncClient(sys.argv[1]) as client:
        held = await client.open_checkout(checkout)
        await asyncio.gather(*(held.attach(each) for each in places))
        await held.renew()  # on a channel that carried a descriptor
client, here = Client(sys.argv[1]), Path(sys.argv[2])
client.socket_status = client.health()  # connects as who it is now
for line in sys.stdin:
    try:
        answer = eval(line)
    except MirrordError as error:
        answer = {"code": error.code, "hint": error.hint}
    except OSError as error:
        answer = {"errno": error.errno}
    print(json.dumps(answer, default=str), flush=True)
"""


class Inhabitant:
    """A process in namespaces of its own, which evaluates what it is told; `here` is a tmpfs."""

    def __init__(self, running: Daemon, here: Path, *, enter: str, uid: int) -> None:
        program = [*anyone.python(), "-c", INHABITANT, str(running.socket), str(here)]
        script = (
            f'{enter} sh -c \'mount -t tmpfs none "$0" && mkdir "$0/at" && exec "$@"\' "$0" "$@"'
        )
        self.process = subprocess.Popen(
            ["sh", "-c", script, str(here), *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=uid, group=uid, extra_groups=[MEMBER],
        )  # fmt: skip

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(expression, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def reads(self, name: str = "README") -> str:
        return str(self(f"(here / 'at' / {name!r}).read_text()"))

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    upstream = Upstream(tmp_path_factory.mktemp("upstream") / "o" / "r")
    for number in range(3):
        upstream.commit({"README": f"{number}\n", "src/main.py": f"print({number})\n"})
        upstream.git("tag", f"v{number}")
    with daemon(CONFIG, start=False) as made, Client(made.socket) as client:
        put_environment(made.state_dir, "tools")
        made.start()
        made.root.joinpath("here").mkdir()
        client.wait(client.add_mirror("o/r", upstream.url))
        yield made


@pytest.fixture
def client(running: Daemon) -> Iterator[Client]:
    with Client(running.socket) as made:
        yield made
        for held in made.list_checkouts():
            made.release_checkout(held.id)


@pytest.fixture
def checkout(client: Client) -> Checkout:
    return client.checkout("o/r@v1", owner=OWNER)


@pytest.fixture
def enter(running: Daemon) -> Iterator[Callable[..., Inhabitant]]:
    inside = []

    def start(
        uid: int = OWNER, enter: str = "unshare --user --map-root-user --mount"
    ) -> Inhabitant:
        made = Inhabitant(running, running.root / "here", enter=enter, uid=uid)
        inside.append(made)
        return made

    yield start
    for each in inside:
        each.end()


def attach(inhabitant: Inhabitant, checkout: Checkout, place: str = "at") -> Any:
    return inhabitant(f"client.attach_checkout({checkout.id!r}, here / {place!r})")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def host_mounts(checkout: Checkout) -> int:
    return "\n".join(mount_lines()).count(checkout.id)


# -- by its owner -------------------------------------------------------------------------------------


def test_an_owner_attaches_in_its_own_namespace_and_follows_resets(
    checkout: Checkout, enter: Callable[..., Inhabitant]
) -> None:
    """As root of a user namespace: what it writes is in the diff, the host mounts nothing more."""
    inhabitant = enter()
    assert attach(inhabitant, checkout) is None
    assert host_mounts(checkout) == 1
    assert inhabitant.reads() == "1\n"
    assert inhabitant("(here / 'at/README').stat().st_uid") == 0  # its own
    for commit in ("v2", "v0"):
        inhabitant("(here / 'at/new').write_text('mine')")
        assert b"+mine" in checkout.diff()
        checkout.reset(commit=commit)
        assert inhabitant.reads() == f"{commit[1]}\n"
        assert inhabitant("sorted(os.listdir(here / 'at'))") == [".git", "README", "src"]
    options = [
        line.split()[5] for line in inhabitant("Path('/proc/self/mountinfo').read_text(errors='replace').splitlines()")
        if line.split()[4].endswith("/here/at")
    ]  # fmt: skip
    assert len(options) == 2
    assert all({"nosuid", "nodev"} <= set(each.split(",")) for each in options)
    checkout.release()
    until(lambda: inhabitant("os.path.exists(here / 'at/README')") is False)


def test_another_checkout_takes_the_place_of_the_one_before(
    client: Client, enter: Callable[..., Inhabitant]
) -> None:
    """Held or released: one place never has more than the mounts of one."""
    inhabitant = enter()
    for release, commit in ((False, "v0"), (True, "v1"), (False, "v2")):
        checkout = client.checkout(f"o/r@{commit}", owner=OWNER)
        attach(inhabitant, checkout)
        assert inhabitant.reads() == f"{commit[1]}\n"
        assert (
            inhabitant("Path('/proc/self/mountinfo').read_text(errors='replace').count('here/at')")
            == 2
        )
        if release:
            checkout.release()
            until(lambda: inhabitant("os.path.exists(here / 'at/README')") is False)


def test_a_subordinate_uid_attaches_in_a_namespace_that_maps_its_whole_range(
    running: Daemon, client: Client
) -> None:
    """As rootless containers have it; others of the range are not its owner."""
    checkout = client.checkout("o/r@v1", owner=SUBUIDS + 5)
    script = (
        "import ctypes, os, sys; libc = ctypes.CDLL(None);"
        f"os.setgroups([]); os.setresgid(*[{SUBUIDS + 5}] * 3); os.setresuid(*[{SUBUIDS + 5}] * 3);"
        "libc.prctl(4, 1, 0, 0, 0); assert libc.unshare(0x10020000) == 0; print(flush=True);"
        "sys.stdin.readline();"
        "from pathlib import Path; from mirrord import Client; client = Client(sys.argv[1]);"
        "libc.mount(b'none', b'/mnt', b'tmpfs', 0, None); os.mkdir('/mnt/at');"
        "client.attach_checkout(sys.argv[2], '/mnt/at');"
        "at = Path('/mnt/at'); (at / 'new').write_text('x'); print((at / 'new').stat().st_uid)"
    )
    made = subprocess.Popen(
        [*anyone.python(), "-c", script, str(running.socket), checkout.id],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert made.stdout is not None
    made.stdout.readline()
    for kind in ("uid_map", "gid_map"):
        Path(f"/proc/{made.pid}/{kind}").write_text(f"0 {SUBUIDS} 65536\n")
    assert made.communicate("\n")[0].strip() == "5"
    assert Path(checkout.path, "new").stat().st_uid == SUBUIDS + 5


def test_its_environment_goes_to_a_place_of_its_own(
    client: Client, enter: Callable[..., Inhabitant]
) -> None:
    """As writable as the tree, and as clean after a reset."""
    inhabitant = enter()
    inhabitant("(here / 'tools').mkdir()")
    checkout = client.checkout("o/r@v1", owner=OWNER, environment="tools")
    opened = f"client.open_checkout({checkout.id!r})"
    inhabitant(f"{opened}.attach(here / 'at', environment=here / 'tools')")
    tool = "here / 'tools/bin/tool'"
    assert (inhabitant(f"({tool}).read_text()"), inhabitant.reads()) == ("tool\n", "1\n")
    inhabitant(f"({tool}).write_text('mine')")
    assert Path(checkout.directory, "environment/bin/tool").read_text() == "mine"
    checkout.reset()
    assert inhabitant(f"({tool}).read_text()") == "tool\n"


def test_the_directory_of_both_is_attached_and_follows_resets(
    client: Client, enter: Callable[..., Inhabitant]
) -> None:
    inhabitant = enter()
    checkout = client.checkout("o/r@v1", owner=OWNER, environment="tools")
    where = "here / 'at', target='directory'"
    inhabitant(f"client.attach_checkout({checkout.id!r}, {where})")
    assert inhabitant.reads("tree/README") == "1\n"
    inhabitant("(here / 'at/environment/bin/tool').write_text('mine')")
    checkout.reset(commit="v2")
    assert inhabitant.reads("tree/README") == "2\n"
    assert inhabitant.reads("environment/bin/tool") == "tool\n"
    inhabitant(f"client.attach_checkout({checkout.id!r}, here / 'at')")
    assert inhabitant.reads() == "2\n"
    assert (
        inhabitant("Path('/proc/self/mountinfo').read_text(errors='replace').count('here/at')") == 2
    )


def test_what_is_attached_read_only_stays_so_over_a_reset(
    checkout: Checkout, enter: Callable[..., Inhabitant]
) -> None:
    inhabitant = enter()
    inhabitant(f"client.attach_checkout({checkout.id!r}, here / 'at', read_only=True)")
    write = "(here / 'at/new').write_text('')"
    assert (inhabitant.reads(), inhabitant(write)) == ("1\n", {"errno": errno.EROFS})
    checkout.reset(commit="v2")
    assert (inhabitant.reads(), inhabitant(write)) == ("1\n", {"errno": errno.EROFS})


def test_tasks_of_one_asynchronous_client_attach_at_once(
    checkout: Checkout, enter: Callable[..., Inhabitant]
) -> None:
    """No answer and no descriptor is another's, and none stays open."""
    inhabitant = enter()
    places = [f"place{number}" for number in range(20)]
    inhabitant(f"[(here / name).mkdir() for name in {places}]")
    before = inhabitant("len(os.listdir('/proc/self/fd'))")
    inhabitant(f"asyncio.run(attach_async({checkout.id!r}, *(here / name for name in {places})))")
    checkout.reset(commit="v2")
    read = inhabitant(f"[(here / name / 'README').read_text() for name in {places}]")
    assert read == ["2\n"] * 20
    assert inhabitant("len(os.listdir('/proc/self/fd'))") == before


CROWD = """
import ctypes, os, sys
from mirrord import Client
libc, (path, *ids) = ctypes.CDLL(None), sys.argv[1:]
os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3); libc.prctl(4, 1, 0, 0, 0)
reading, writing = os.pipe()
children = []
for number in range(64):
    if (child := os.fork()) == 0:
        assert libc.unshare(0x10020000) == 0
        for name, text in (("setgroups", "deny"), ("uid_map", "0 65534 1"), ("gid_map", "0 65534 1")):
            open(f"/proc/self/{name}", "w").write(text)
        libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)
        os.mkdir("/mnt/at")
        os.close(writing)
        os.read(reading, 1)  # all at once
        Client(path).attach_checkout(ids[number % len(ids)], "/mnt/at")
        os._exit(open("/mnt/at/README").read() != "1\\n")
    children.append(child)
os.close(writing)
print([os.waitpid(child, 0)[1] for child in children].count(0))
"""


def test_sixty_four_attach_at_once_and_nothing_is_left_open(
    running: Daemon, client: Client, checkout: Checkout
) -> None:
    other = client.checkout("o/r@v1", owner=OWNER)
    before = open_files(running.pid)
    command = [*anyone.python(), "-c", CROWD, str(running.socket), checkout.id, other.id]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "64", done.stderr
    until(lambda: open_files(running.pid) <= before)


def test_an_attach_between_resets_shows_the_last_one(
    checkout: Checkout, enter: Callable[..., Inhabitant]
) -> None:
    """A mount that was given before a reset and attached after it would show the old tree."""
    inhabitant = enter()
    ended = threading.Event()

    def keep_resetting() -> None:
        while not ended.is_set():
            checkout.reset(commit="v2")
            checkout.reset(commit="v1")

    resetting = threading.Thread(target=keep_resetting)
    resetting.start()
    try:
        for _ in range(20):
            attach(inhabitant, checkout)
    finally:
        ended.set()
        resetting.join()
    Path(checkout.path, "mark").write_text("now")
    assert inhabitant.reads("mark") == "now"


# -- refusals -----------------------------------------------------------------------------------------


def test_what_cannot_be_attached_is_refused_with_a_hint(
    running: Daemon, client: Client, checkout: Checkout, enter: Callable[..., Inhabitant]
) -> None:
    inhabitant, outside = enter(), enter(enter=": no namespace; exit 0;")
    outside.end()
    inhabitant("os.symlink('at', here / 'link')")
    inhabitant("(here / 'file').write_text('')")
    assert attach(inhabitant, checkout, "link")["code"] == "usage"
    assert attach(inhabitant, checkout, "file")["code"] == "usage"
    assert attach(inhabitant, checkout, "absent")["code"] == "path-not-found"
    wrong = "client.attach_checkout('a' * 16, here / 'at')"
    assert inhabitant(wrong)["code"] == "checkout-not-found"
    environment = f"client.attach_checkout({checkout.id!r}, here / 'at', target='environment')"
    assert inhabitant(environment)["code"] == "path-not-found"
    plain = client.checkout("o/r@v1", owner=OWNER, backend=Backend.POOL)
    refused = attach(inhabitant, plain)
    assert (refused["code"], "overlay" in refused["hint"]) == ("backend-unavailable", True)
    assert inhabitant("os.listdir(here / 'at')") == []
    assert attach(enter(OTHER), checkout)["code"] == "checkout-not-found"
    checkout.release()
    assert attach(inhabitant, checkout)["code"] == "checkout-not-found"


def test_who_may_not_mount_is_told_what_is_missing(
    running: Daemon, checkout: Checkout, tmp_path: Path
) -> None:
    """The descriptor alone gives nothing that its holder may not do with its own files."""
    script = (
        "import sys; from mirrord import Client, AccessError\n"
        "try: Client(sys.argv[1]).attach_checkout(sys.argv[2], '/mnt')\n"
        "except AccessError as error: print(error.hint)"
    )
    done = subprocess.run(
        [*anyone.python(), "-c", script, str(running.socket), checkout.id],
        user=OWNER, group=OWNER, extra_groups=[], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "CAP_SYS_ADMIN" in done.stdout
    assert "unshare --user" in done.stdout


def test_a_private_namespace_is_no_obstacle_to_an_attachable_checkout(
    running: Daemon, enter: Callable[..., Inhabitant]
) -> None:
    """It shows no overlay that is mounted after it began; the refusal of one names the cure."""
    inhabitant = enter(MEMBER)  # `unshare` makes all of it private
    refused = inhabitant("client.checkout('o/r@v1', backend='overlay')")
    assert (refused["code"], "attach" in refused["hint"]) == ("backend-unavailable", True)
    inhabitant("globals().update(one=client.checkout('o/r@v1', attach=True))")
    assert inhabitant("os.listdir(one.path)") in ([], {"errno": 13})
    inhabitant("one.attach(here / 'at')")
    assert inhabitant.reads() == "1\n"
    inhabitant("one.release()")


# -- misbehaviour -------------------------------------------------------------------------------------


def test_descriptors_that_are_never_read_or_attached_go_with_their_client(
    running: Daemon, checkout: Checkout
) -> None:
    """The daemon keeps none, and a reset or release waits for none."""
    before = open_files(running.pid)
    path = f"/v1/checkouts/{checkout.id}/attach"
    request = f"POST {path} HTTP/1.1\r\nhost: m\r\ncontent-length: 0\r\n\r\n".encode()
    unread = [running.connect() for _ in range(20)]
    for each in unread:
        each.sendall(request)
    kept = [_read_descriptor(each) for each in unread[:5]]
    checkout.reset()
    checkout.release()
    assert len(kept) == 5
    for each in unread:
        each.close()
    until(lambda: open_files(running.pid) <= before)
    for descriptor in kept:
        with pytest.raises(errors.MirrordError):
            mounts.attach(descriptor, Path("/nonexistent"))
        os.close(descriptor)


def _read_descriptor(connection: socket.socket) -> int:
    while True:
        data, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_LEN(4))
        assert data
        if ancillary:
            return array.array("i", ancillary[0][2])[0]


def test_a_client_that_reads_no_answers_gets_no_descriptors(
    running: Daemon, checkout: Checkout
) -> None:
    """Nor does it keep the daemon from others."""
    path = f"/v1/checkouts/{checkout.id}"
    pipelined = f"GET {path} HTTP/1.1\r\nhost: m\r\n\r\n".encode() * 2000
    pipelined += (
        f"POST {path}/attach HTTP/1.1\r\nhost: m\r\ncontent-length: 0\r\n\r\n".encode() * 50
    )
    before = open_files(running.pid)
    with running.connect() as connection:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                connection.send(pipelined)
        assert running.request("GET", path)[0] == 200
    until(lambda: open_files(running.pid) <= before)


def test_a_killed_daemon_leaves_what_is_attached_and_the_next_one_resets_it(
    tmp_path: Path,
) -> None:
    upstream = Upstream(tmp_path / "r")
    upstream.commit({"README": "0\n"})
    with daemon(CONFIG) as made, Client(made.socket) as client:
        made.root.joinpath("here").mkdir()
        client.wait(client.add_mirror("o/r", upstream.url))
        checkout = client.checkout("o/r@main", owner=OWNER, auto_renew=False)
        inhabitant = Inhabitant(
            made, made.root / "here", enter="unshare --user --map-root-user --mount", uid=OWNER
        )
        try:
            attach(inhabitant, checkout)
            made.kill()
            assert inhabitant.reads() == "0\n"
            inhabitant("(here / 'at/new').write_text('mine')")
            made.start()
            checkout.reset()
            assert inhabitant("(here / 'at/new').exists()") is False
            inhabitant("(here / 'at/new').write_text('mine')")
            assert b"+mine" in checkout.diff()
        finally:
            inhabitant.end()


# -- from outside -------------------------------------------------------------------------------------

CONTAINER = """
set -e
mount -t tmpfs none "$0"; cd "$0"; mkdir usr proc testbed old away; ln -s away trap; ln -s /testbed link
mount --rbind /usr usr; mount --rbind /proc proc; for each in bin sbin lib lib64; do ln -s usr/$each $each; done
pivot_root . old; umount -l /old; cd /; umount -l /proc
echo ready; while read -r line; do eval "$line"; echo; echo end; done
"""


class Container:
    """A shell in a root of its own, without /proc, begun with an empty /testbed."""

    def __init__(self, root: Path, *start: str) -> None:
        self.process = subprocess.Popen(
            [*start, "unshare", "--mount", "sh", "-c", CONTAINER, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self, script: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(script, file=self.process.stdin, flush=True)
        return "".join(iter(self.process.stdout.readline, "end\n")).removesuffix("\n")


@pytest.fixture(params=["root", "rootless"])
def container(running: Daemon, request: pytest.FixtureRequest) -> Iterator[Container]:
    start = [] if request.param == "root" else ["unshare", "--user", "--map-root-user"]
    made = Container(running.root / "here", *start)
    yield made
    made.process.communicate()


def mirrord(running: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mirrord", "--socket", str(running.socket), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def test_root_attaches_in_a_running_container_from_outside(
    running: Daemon, checkout: Checkout, container: Container
) -> None:
    """It follows resets there, and a second one takes its place."""
    pid = str(container.process.pid)
    done = mirrord(running, "attach", checkout.id, "/testbed", "--pid", pid)
    assert (done.returncode, done.stdout) == (0, "/testbed\n"), done.stderr
    assert container.run("cat /testbed/README") == "1\n"
    checkout.reset(commit="v2")
    assert container.run("cat /testbed/README") == "2\n"
    assert (
        mirrord(running, "attach", checkout.path.as_posix(), "/testbed", "--pid", pid).returncode
        == 0
    )
    mounted = "\n".join(mount_lines(pid))
    assert (mounted.count("/testbed"), "here/testbed" in mounted) == (2, False)


def test_a_container_steers_no_path_out_of_itself(
    running: Daemon, checkout: Checkout, container: Container
) -> None:
    """`..` ends at its root, and a symbolic link is refused wherever it is in the path."""
    pid = container.process.pid
    container.run("mkdir -p /away/inner; mkdir /etc")
    for path in ("/link", "/trap/inner", "/bin/X11", "/testbed/../trap"):
        assert mirrord(running, "attach", checkout.id, path, "--pid", str(pid)).returncode == 2, (
            path
        )
    assert (
        mirrord(running, "attach", checkout.id, "../../../etc", "--pid", str(pid)).returncode == 0
    )
    assert container.run("cat /etc/README") == "1\n"
    assert host_mounts(checkout) == 1


def test_a_process_that_has_ended_and_one_of_another_user_are_refused(
    running: Daemon, client: Client
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    checkout = client.checkout("o/r@v1", owner=OWNER)
    done = mirrord(running, "attach", checkout.id, "/mnt", "--pid", str(ended.pid))
    assert done.returncode == 4, done.stderr
    script = f"import sys; from mirrord.cli.main import main; main(['--socket', '{running.socket}', *sys.argv[1:]])"
    refused = subprocess.run(
        [*anyone.python(), "-c", script, "attach", checkout.id, "/mnt", "--pid", "1"],
        user=OWNER, group=OWNER, extra_groups=[], capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert (refused.returncode, "only root may" in refused.stderr) == (3, True), refused.stderr
