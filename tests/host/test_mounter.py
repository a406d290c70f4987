"""The mount service as a privilege boundary: a real process, real mounts, a hostile daemon's user."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyone
import pytest
from mount_table import mount_lines
from mounted_templates import KERNELS, TREE, Lab, mounted_below, mounted_templates
from waiting import BOUND_S, until

from mirrord.errors import (
    AccessError,
    BackendUnavailableError,
    InvalidRequestError,
    MirrordError,
    ResourceError,
    from_problem,
)
from mirrord.host import mounts
from mirrord.host.files import opened
from mirrord.host.mounting import LocalMounter, RemoteMounter, choose_mounter
from mirrord.host.overlays import OverlayOrder

DAEMON, USER, STRANGER = 23456, (12345, 12346), 34567
NAME = "a" * 16
CONNECT = (
    "import json, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
    " s.connect(sys.argv[1]); "
)

pytestmark = [
    pytest.mark.skipif(not mounts.may_mount(), reason="mounting needs CAP_SYS_ADMIN"),
    pytest.mark.root,
]

ENVIRONMENT = ".environments/" + "a" * 64 + "/files"


class Service:
    """The service on a lab's state, started and ended by the test."""

    def __init__(self, lab: Lab, kernel: tuple[int, ...]) -> None:
        self.lab = lab
        self.kernel = kernel
        self.socket = lab.state / "mount.sock"
        self.start()

    def start(self) -> None:
        script = (
            "import sys; from mirrord.host import mounter, mounts;"
            f" mounts.KERNEL = {self.kernel}; sys.exit(mounter.main())"
        )
        command = [sys.executable, "-I", "-c", script, "--state-dir", str(self.lab.state)]
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*command, "--user", str(DAEMON), "--socket", str(self.socket)], stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + BOUND_S
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def stop(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=BOUND_S)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(self.socket))
        except OSError:
            connection.close()
            raise
        connection.settimeout(BOUND_S)
        return connection

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def ask(self, message: bytes) -> dict[str, Any]:
        """Send one raw message; return the answer."""
        with self.connect() as connection:
            connection.send(message)
            answer: dict[str, Any] = json.loads(connection.recv(65536))
            return answer


@pytest.fixture
def lab() -> Iterator[Lab]:
    with mounted_templates(DAEMON) as made:
        yield made


@pytest.fixture(params=KERNELS, ids=str)
def service(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Service]:
    made = Service(lab, request.param)
    yield made
    made.stop()


@pytest.fixture
def mounter(service: Service) -> Iterator[RemoteMounter]:
    made = RemoteMounter(service.socket)
    yield made
    made.close(unbind=False)


def overlays(lab: Lab) -> list[str]:
    """What is mounted except the bound directories and the idmapped templates."""
    paths = [Path(path) for path in mounted_below(lab.state)]
    return [
        str(path)
        for path in paths
        if lab.state not in path.parents[:1] and path.parent != lab.state / "idmaps"
    ]


def as_uid(uid: int, script: str, *args: str) -> str:
    """Run Python as another user, without capabilities."""
    command = [*anyone.python(), "-c", script, *args]
    done = subprocess.run(
        command,
        user=uid,
        group=uid,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
        env={},
    )
    return done.stdout + done.stderr


# -- what it is for --------------------------------------------------------------------------------


def test_the_daemons_user_mounts_and_unmounts(lab: Lab, service: Service) -> None:
    """Without any capability it reads its mount before it is attached, and can delete all files."""
    order = lab.checkout()
    script = """
import os, shutil, sys
from pathlib import Path
from mirrord.host.mounting import RemoteMounter
from mirrord.host.overlays import OverlayOrder
mounter = RemoteMounter(Path(sys.argv[1]))
tree, layer = Path(sys.argv[3]), Path(sys.argv[4])
mount = mounter.make(OverlayOrder(sys.argv[2], "layer", tuple(sys.argv[5:]), None))
print(os.listdir(tree), sorted(os.listdir(os.open(".", os.O_RDONLY, dir_fd=mount))))
mounter.attach(sys.argv[2], mount)
os.close(mount)
print((tree / "README").read_text(), os.listdir(tree / ".git"))
(tree / "README").write_text("above")
mounter.umount(sys.argv[2])
print(os.listdir(tree))
for inner in ("work", "work/incompat", "work/incompat/volatile"):
    os.chmod(layer / "work" / inner, 0o700)
shutil.rmtree(layer)
"""
    layer = lab.upper(order).parent
    answer = as_uid(
        DAEMON,
        script,
        str(service.socket),
        order.checkout,
        str(lab.tree(order)),
        str(layer),
        *order.layers,
    )
    assert answer == "[] ['.git', 'README', 'src']\nbelow\n ['HEAD']\n[]\n"
    assert not layer.exists()


def test_a_client_owns_its_files(lab: Lab, mounter: RemoteMounter) -> None:
    """The daemon's layers appear as that user's, and new files are that user's."""
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    tree = lab.tree(order)
    script = (
        "import os, sys; os.chdir(sys.argv[1]); print(os.stat('README').st_uid);"
        " open('README', 'w').write('mine')"
    )
    assert as_uid(USER[0], script, str(tree)) == f"{USER[0]}\n"
    assert (lab.upper(order) / "README").stat().st_uid == USER[0]
    assert (lab.template / "README").read_text() == "below\n"
    mounter.umount(order.checkout)
    assert overlays(lab) == []


def test_a_restarted_service_continues(lab: Lab, service: Service, mounter: RemoteMounter) -> None:
    """It has no state; a client reconnects, and earlier mounts can be unmounted."""
    order = lab.checkout()
    lab.mount(mounter, order)
    service.stop()
    service.start()
    mounter.umount(order.checkout)
    assert overlays(lab) == []


def test_idmapped_templates_end_with_the_service(
    lab: Lab, service: Service, mounter: RemoteMounter
) -> None:
    """After a kill with the next start, after a stop at once; overlays keep their layers."""
    views = []
    orders = [lab.checkout(USER) for _ in range(3)]
    for order, end in zip(orders, (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), strict=True):
        lab.mount(mounter, order)
        views.append(mounted_below(lab.state / "idmaps"))
        service.stop(end)
        if end is signal.SIGKILL:
            service.start()
    assert service.process.returncode == 0
    assert [len(each) for each in views] == ([0] * 3 if service.kernel >= (6, 15) else [1] * 3)
    assert len({path for each in views for path in each}) == sum(map(len, views))
    assert [path for path in mounted_below(lab.state) if "idmaps" in path] == []
    for order in orders:
        assert (lab.tree(order) / "README").stat().st_uid == USER[0]


def test_no_link_is_followed_to_the_idmapped_templates(
    lab: Lab, service: Service, mounter: RemoteMounter
) -> None:
    """A daemon may put one there; nothing is mounted over its target."""
    victim = lab.state / "victim"
    victim.mkdir()
    (lab.state / "idmaps").symlink_to(victim)
    if service.kernel < (6, 15):
        with pytest.raises((FileNotFoundError, MirrordError)):
            mounter.make(lab.checkout(USER))
    assert not any(str(victim) in line for line in mount_lines())


def test_missing_paths(lab: Lab, mounter: RemoteMounter) -> None:
    """Unmounting nothing is fine; mounting a missing path is FileNotFoundError, as without the service."""
    mounter.umount(NAME)
    with pytest.raises(FileNotFoundError):
        mounter.make(OverlayOrder(NAME, "layer", (TREE,), None))
    gone = lab.checkout(layers=(TREE.replace("1", "3"),))
    with pytest.raises(FileNotFoundError):
        mounter.make(gone)


def test_an_unreachable_service_is_an_unavailable_backend(lab: Lab, service: Service) -> None:
    """A service that hangs or is absent costs a bounded time."""
    mounter = RemoteMounter(service.socket, timeout=timedelta(milliseconds=200))
    service.process.send_signal(signal.SIGSTOP)
    with pytest.raises(BackendUnavailableError):
        mounter.umount(NAME)
    service.process.send_signal(signal.SIGCONT)
    mounter.umount(NAME)
    mounter.close(unbind=False)
    with pytest.raises(BackendUnavailableError):
        RemoteMounter(lab.state / "nothing").umount(NAME)


def test_a_privileged_process_mounts_by_itself(lab: Lab) -> None:
    """The service is for processes that may not mount, or whose mounts are not visible."""
    assert isinstance(choose_mounter(lab.state, lab.state / "mount.sock"), LocalMounter)
    script = "import sys; from pathlib import Path; "
    script += "from mirrord.host.mounting import choose_mounter as c; "
    there = as_uid(DAEMON, script + "print(c(Path('/'), Path('/proc/self')))")
    assert "RemoteMounter" in there
    assert "BackendUnavailableError" in as_uid(DAEMON, script + "c(Path('/'), Path('/nothing'))")


# -- who may ask -----------------------------------------------------------------------------------


def test_only_the_daemons_user_may_connect(service: Service) -> None:
    """The socket's mode refuses others, and then the peer's credentials do."""
    script = CONNECT + "print(json.loads(s.recv(4096))['problem']['status'])"
    assert "PermissionError" in as_uid(STRANGER, script, str(service.socket))
    service.socket.chmod(0o666)
    assert as_uid(STRANGER, script, str(service.socket)) == "403\n"


def test_a_refusal_is_the_same_error_at_the_client(service: Service, lab: Lab) -> None:
    """Errors cross the socket as code and message."""
    service.socket.chmod(0o666)
    script = (
        CONNECT
        + "from mirrord.errors import from_problem; "
        + "print(type(from_problem(json.loads(s.recv(4096))['problem'])).__name__)"
    )
    assert as_uid(STRANGER, script, str(service.socket)) == f"{AccessError.__name__}\n"


def test_connections_are_bounded(service: Service) -> None:
    """A user with many is refused, and others still get answers."""
    held = [service.connect() for _ in range(80)]
    try:
        held[0].send(b'{"request": "umount", "checkout": "%s"}' % NAME.encode())
        assert held[0].recv(4096) == b"{}"
        assert b"problem" in held[-1].recv(4096)
    finally:
        for connection in held:
            connection.close()
    _wait_for_answer(service)


_LOOK = """
import sys
from pathlib import Path
from mirrord.host.mounting import RemoteMounter
from mirrord.host.mount_tables import shares_mounts, visible_to
state, mounter = Path(sys.argv[1]), RemoteMounter(Path(sys.argv[2]))
for pid in map(int, sys.argv[3:]):
    seen = visible_to(pid, state / "checkouts"), mounter.visible_to(pid)
    print(shares_mounts(pid), *(each.name for each in seen))
"""
_HIDE = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --clear-groups "$@"'


def test_the_service_sees_whom_the_daemon_may_not(lab: Lab, service: Service) -> None:
    """As under ProtectProc=invisible: what the daemon cannot read is unknown to it, and never yes.
    The service tells who shares mounts, who has a copy of them, and nothing of who has ended.
    """
    with ExitStack() as stack:
        command = ["setpriv", f"--reuid={STRANGER}", "sleep", "60"]
        pids = []
        for around in ([], ["unshare", "--mount", "--propagation", "private"]):
            shown = stack.enter_context(subprocess.Popen([*around, *command]))
            stack.callback(shown.kill)
            name = Path(f"/proc/{shown.pid}/comm")
            until(partial(lambda comm: comm.read_text() == "sleep\n", name))
            pids.append(str(shown.pid))
        hidden = ["unshare", "--mount", "sh", "-c", _HIDE, "sh", f"--reuid={DAEMON}"]
        python = [*anyone.python(), "-c", _LOOK, str(lab.state), str(service.socket)]
        done = subprocess.run(
            [*hidden, f"--regid={DAEMON}", *python, *pids, str(2**22)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert done.stdout.splitlines() == [
        "None UNKNOWN MOUNTS",
        "None UNKNOWN FILES",
        "None UNKNOWN UNKNOWN",
    ]


def _wait_for_answer(service: Service) -> None:
    """Wait until the service has noticed closed connections."""
    until(lambda: _is_answered(service))


def _is_answered(service: Service) -> bool:
    try:
        return service.ask(b'{"request": "umount", "checkout": "%s"}' % NAME.encode()) == {}
    except OSError:
        return False


# -- what may be asked -----------------------------------------------------------------------------


BAD_OWNERS: list[object] = [
    [],
    [1],
    [1, 2, 3],
    "12",
    ["1", "2"],
    [-1, 5],
    [5, -1],
    [2**32 - 1, 5],
    [True, 5],
    [1.0, 5],
    {"a": 1},
    3,
]
HOSTILE: list[object] = [
    *({"request": "visible", "pid": pid, "pids": 1} for pid in ("1", -1, 2**40, 1.5, True, None)),
    {"request": "visible", "pid": 1},
    *(
        {"request": "make", "checkout": name, "upper": "layer", "layers": [TREE], "owner": None}
        for name in (
            "",
            ".",
            "..",
            "../checkouts",
            f"{NAME}/../{NAME}",
            f"/{NAME}",
            f"{NAME}/tree",
            NAME.upper(),
            NAME[:-1],
            NAME + "a",
            f"{NAME}\n",
            f"{NAME}\0",
            "1" * 16,
            ".warm-x",
            f".trash-{NAME}",
            f".next-.next-{NAME}",
            ".next-",
            f"x.next-{NAME}",
            None,
            1,
            [NAME],
            {"a": NAME},
        )
    ),
    *(
        {"request": "make", "checkout": NAME, "upper": "layer", "layers": layers, "owner": None}
        for layers in (
            [],
            None,
            7,
            "x",
            [None],
            [["x"]],
            ["/etc"],
            ["../../../etc"],
            ["."],
            [""],
            ["psf__requests"],
            [TREE + "/.."],
            [TREE + "/../../../../../etc"],
            ["../templates/" + TREE],
            [TREE + ":/etc"],
            [TREE + ",upperdir=/etc"],
            ["..__../trees/" + "1" * 40 + "/files"],
            ["a/../trees/" + "1" * 40 + "/files"],
            [TREE] * 161,
            [TREE + "\n"],
            [".layers"],
            [".layers/.."],
            [".layers/" + "a" * 15],
            [".layers/" + "a" * 16 + "/d"],
            [".layers/" + "a" * 16 + ".stats"],
            [ENVIRONMENT],
            {TREE: 1},
        )
    ),
    *(
        {"request": "make", "owner": None, "checkout": NAME, "upper": upper, "layers": [layer]}
        for upper in ("environment", "environment-next")
        for layer in (
            TREE,
            ".environments/files",
            ".environments/.files",
            ".environments/" + "a" * 63 + "/files",
            ".environments/" + "a" * 64,
            ".environments/" + "a" * 64 + "/log",
            ".environments/../../leases/" + NAME,
        )
    ),
    *(
        {"request": kind, "checkout": NAME, "target": target}
        for kind in ("attach", "replace", "clone")
        for target in ("", "..", "tree/..", "environment/bin", "layer", "/etc", None, 1)
    ),
    *(
        {"request": "make", "owner": owner, "checkout": NAME, "upper": "layer", "layers": [TREE]}
        for owner in BAD_OWNERS
    ),
    *(
        {"request": "make", "owner": None, "checkout": NAME, "upper": upper, "layers": [TREE]}
        for upper in ("", "..", "layer/upper", "/etc", "layers", None, 1)
    ),
    *(
        {"request": kind, "checkout": name}
        for kind in ("umount", "attach", "replace")
        for name in (
            "",
            ".",
            "..",
            "../leases",
            f"{NAME}/..",
            f"{NAME}/tree",
            "/",
            f"{NAME}\n",
            f"{NAME}\0",
            "a" * 256,
            None,
            1,
        )
    ),
    *(
        {"request": kind}
        for kind in cast(
            "tuple[Any, ...]",
            ("make", "attach", "replace", "umount", "mount", "", None, "exec", 1, ["make"], {}),
        )
    ),
    {},
    [],
    None,
    1,
    "mount",
    [{"request": "umount"}],
]


def test_an_environment_is_mounted_beside_the_tree_and_replaced(
    lab: Lab, mounter: RemoteMounter
) -> None:
    """As its owner's; one umount unmounts both."""
    prefix = lab.layer(ENVIRONMENT, {"bin/python": "below\n"})
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    public, private = lab.tree(order).parent, lab.upper(order).parent.parent
    (public / "environment").mkdir(0o700)
    for upper, show in (("environment", mounter.attach), ("environment-next", mounter.replace)):
        for path in (private / upper, private / upper / "upper", private / upper / "work"):
            path.mkdir()
        os.chown(private / upper / "upper", *USER)
        made = mounter.make(order._replace(upper=upper, layers=(ENVIRONMENT,)))
        with opened(made):
            show(order.checkout, made, "environment")
        seen = public / "environment/bin/python"
        assert (seen.read_text(), seen.stat().st_uid) == ("below\n", USER[0])
        seen.write_text(upper)
        assert (private / upper / "upper/bin/python").read_text() == upper
    assert (prefix / "bin/python").read_text() == "below\n"
    assert (lab.tree(order) / "README").exists()
    mounter.umount(order.checkout)
    assert overlays(lab) == []


def test_malformed_requests_are_refused(lab: Lab, service: Service) -> None:
    """And the service continues."""
    with service.connect() as connection:
        for request in HOSTILE:
            connection.send(json.dumps(request).encode())
            problem = json.loads(connection.recv(65536)).get("problem")
            assert problem is not None, request
            assert isinstance(from_problem(problem), InvalidRequestError), (request, problem)
    assert overlays(lab) == []


@pytest.mark.parametrize(
    "message",
    [b"\0", b"\xff\xfe", b"{", b"[" * 60000, b"9" * 60000, b'{"request":' + b" " * 100_000 + b"1}"],
)
def test_messages_that_are_no_requests(service: Service, message: bytes) -> None:
    """Neither deep nor long nor invalid JSON ends the service."""
    assert isinstance(from_problem(service.ask(message)["problem"]), InvalidRequestError)
    assert service.ask(b'{"request": "umount", "checkout": "%s"}' % NAME.encode()) == {}


KNOWN = 5  # games, a system user of every Debian
PERSON = pwd.getpwnam("nobody")
REFUSED = {
    "root": (0, 0),
    "root's group": (USER[0], 0),
    "the daemon": (DAEMON, DAEMON),
    "the daemon's uid": (DAEMON, USER[1]),
    "a system user": (KNOWN, pwd.getpwuid(KNOWN).pw_gid),
    "a system group": (USER[0], grp.getgrnam("shadow").gr_gid),
    "a group of others": (PERSON.pw_uid, USER[1]),
    "a group with a name": (USER[0], PERSON.pw_gid),
}


@pytest.mark.parametrize("who", REFUSED)
def test_files_are_shown_only_as_ordinary_users_with_their_own_groups(
    lab: Lab, mounter: RemoteMounter, who: str
) -> None:
    """Whatever a compromised daemon writes into a lease, it becomes no other user."""
    order = lab.checkout(REFUSED[who])
    with pytest.raises(BackendUnavailableError):
        mounter.make(order)
    assert overlays(lab) == []


@pytest.mark.parametrize("owner", [USER, (PERSON.pw_uid, PERSON.pw_gid)])
def test_files_are_shown_only_as_the_lease_holders(
    lab: Lab, mounter: RemoteMounter, owner: tuple[int, int]
) -> None:
    """The holder of that checkout, and only while it exists."""
    mine, others = lab.checkout(owner), lab.checkout((54321, 54321))
    lab.mount(mounter, mine)
    with pytest.raises(AccessError, match="not leased"):
        mounter.make(others._replace(owner=owner))
    (lab.state / "leases" / others.checkout / "lease.json").unlink()
    with pytest.raises(AccessError, match="not leased"):
        mounter.make(others)


@pytest.mark.parametrize("owner", [USER, (DAEMON, USER[1])])
def test_only_the_daemons_files_are_shown_as_another_users(
    lab: Lab, mounter: RemoteMounter, owner: tuple[int, int]
) -> None:
    """With templates given to another user, that user's files would appear as a third user's."""
    order = lab.checkout((54321, 54321))
    os.chown(lab.state / "templates", *owner)
    with pytest.raises(AccessError, match="belong to"):
        mounter.make(order)


RUN = (
    "import os, subprocess, sys;"
    " print(subprocess.run([sys.argv[1], '-u'], capture_output=True, text=True).stdout)"
)


def test_set_id_bits_of_a_hostile_daemon_have_no_effect(
    lab: Lab, service: Service, mounter: RemoteMounter
) -> None:
    """A set-uid template appears as the victim's, and opening it for writing copies it up: neither copy has an effect."""
    program = lab.template / "id"
    shutil.copy("/usr/bin/id", program)
    os.chown(program, DAEMON, DAEMON)
    program.chmod(0o6777)
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    os.close(os.open(lab.tree(order) / "id", os.O_WRONLY))
    copied = lab.upper(order) / "id"
    assert (copied.stat().st_uid, copied.stat().st_mode & 0o7777) == (USER[0], 0o6777)
    for directory in (lab.tree(order).parent, *copied.parents[:3]):
        directory.chmod(0o777)
    for path in (copied, lab.tree(order) / "id"):
        assert as_uid(DAEMON, RUN, str(path)).strip() == str(DAEMON)
    for name in ("leases", "checkouts"):
        with pytest.raises(OSError, match=r"busy|cross-device"):
            (lab.state / name).rename(lab.state / "moved")
        with pytest.raises(OSError, match="cross-device"):
            (lab.state / name / order.checkout).rename(lab.state / "moved")


def test_foreign_mounts_are_not_attached(
    lab: Lab, service: Service, mounter: RemoteMounter
) -> None:
    """Only the service's own, for that checkout, and once. Unused ones end with the connection."""
    order = lab.checkout()
    with opened(mounter.make(order)) as mount:
        with pytest.raises(FileNotFoundError):
            mounter.attach(lab.checkout().checkout, mount)
        mounter.attach(order.checkout, mount)
        with pytest.raises(FileNotFoundError):
            mounter.replace(order.checkout, mount)
    held = service.open_files()
    for _ in range(100):
        os.close(mounter.make(lab.checkout()))
    assert service.open_files() <= held + 64
    mounter.close(unbind=False)
    _wait_for_answer(service)
    assert service.open_files() <= held


PLACES = [
    "templates",
    "templates/psf__requests",
    f"templates/{TREE}",
    "checkouts/{0}",
    "checkouts/{0}/tree",
]
PLACES += [f"leases/{{0}}{end}" for end in ("", "/layer", "/layer/upper", "/layer/work")]


@pytest.mark.parametrize("place", PLACES)
def test_no_link_is_followed(lab: Lab, mounter: RemoteMounter, place: str) -> None:
    """The daemon's user can put links into its state; the service follows none, not even within it."""
    order = lab.checkout(layers=(TREE,))
    path = lab.state / place.format(order.checkout)
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(FileNotFoundError):
        lab.mount(mounter, order)
    assert overlays(lab) == []


def test_no_link_is_followed_to_an_unmount(lab: Lab, mounter: RemoteMounter) -> None:
    """Mounts elsewhere are not affected."""
    order = lab.checkout()
    lab.mount(mounter, order)
    other = lab.state / "checkouts" / NAME
    other.mkdir()
    (other / "tree").symlink_to(lab.tree(order))
    mounter.umount(NAME)
    assert overlays(lab) == [str(lab.tree(order))]


def test_a_race_with_links_leads_nowhere(lab: Lab, mounter: RemoteMounter) -> None:
    """While a tree becomes a link and back all the time, the link's target is never mounted on."""
    victim = lab.state / "victim"
    victim.mkdir()
    order = lab.checkout(layers=(TREE,))
    tree, aside = lab.tree(order), lab.tree(order).with_name("aside")
    with _turning(tree, aside, victim):
        for _ in range(60):
            with suppress(FileNotFoundError, ResourceError):
                lab.mount(mounter, order)
            mounter.umount(order.checkout)
            assert not os.path.ismount(victim)
            _fresh_work(lab, order)


@contextmanager
def _turning(tree: Path, aside: Path, victim: Path) -> Iterator[None]:
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            with suppress(OSError):  # something is mounted there just now
                tree.rename(aside)
                tree.symlink_to(victim)
                tree.unlink()
            while aside.exists():
                mounts.umount(str(aside))
                with suppress(OSError):
                    aside.rename(tree)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _fresh_work(lab: Lab, order: OverlayOrder) -> None:
    work = lab.upper(order).parent / "work"
    subprocess.run(["rm", "-rf", str(work)], check=True)
    work.mkdir()


def test_only_files_of_overlayfs_are_given_to_the_daemon(lab: Lab, mounter: RemoteMounter) -> None:
    """A link in place of a work directory does not make the service give away its target."""
    order = lab.checkout(layers=(TREE,))
    target = lab.state / "roots"
    (target / "incompat/volatile").mkdir(parents=True)
    (lab.upper(order).parent / "work/work").symlink_to(target)
    with suppress(FileNotFoundError, ResourceError):
        lab.mount(mounter, order)
    assert {
        path.stat().st_uid for path in (target, target / "incompat", target / "incompat/volatile")
    } == {0}


def test_the_service_imports_little() -> None:
    """The privileged process has the standard library and a few of our modules."""
    script = "import sys, mirrord.host.mounter; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, env={}
    )
    loaded = {name for name in done.stdout.split() if "." not in name and not name.startswith("_")}
    assert loaded - set(sys.stdlib_module_names) <= {"mirrord", "sitecustomize"}
    ours = {name for name in done.stdout.split() if name.startswith("mirrord.")}
    rooms = ("files", "followers", "mount_tables", "mounter", "mounts", "overlays", "processes")
    assert ours == {
        "mirrord.errors",
        "mirrord.jsontext",
        "mirrord.model",
        "mirrord.presence",
        "mirrord.quoting",
        "mirrord.host",
        *(f"mirrord.host.{room}" for room in (*rooms, "systemd")),
    }


def test_only_leased_checkouts_are_cloned_and_clones_follow(
    lab: Lab, service: Service, mounter: RemoteMounter
) -> None:
    """The service keeps none of them."""
    order = lab.checkout(USER)
    lab.mount(mounter, order)
    before, place = service.open_files(), lab.state / "place"
    place.mkdir()
    for owner in (STRANGER, STRANGER), (USER[0], STRANGER):
        with pytest.raises(AccessError):
            mounter.clone(order.checkout, "tree", owner)
    with pytest.raises(FileNotFoundError):
        mounter.clone(order.checkout, "environment", USER)
    with pytest.raises(FileNotFoundError):
        mounter.clone("b" * 16, "tree", USER)
    for wrong in ("../leases", ".", "", None):
        request = {"request": "clone", "checkout": order.checkout, "target": wrong, "owner": USER}
        assert service.ask(json.dumps(request).encode())["problem"]["code"] == "invalid-request"
    for _ in range(100):
        os.close(mounter.clone(order.checkout, "tree", USER))
    with opened(mounter.clone(order.checkout, "tree", USER)) as mount:
        mounts.attach(mount, str(place))
    assert (place / "README").read_text() == "below\n"
    both = lab.state / "both"
    both.mkdir()
    with opened(mounter.clone(order.checkout, "directory", USER)) as mount:
        mounts.attach(mount, str(both))
    assert (both / "tree/README").read_text() == "below\n"
    until(lambda: service.open_files() == before)
    mounter.umount(order.checkout)
    assert os.listdir(place) == os.listdir(both / "tree") == []
