"""Attacks from within a checkout, by the uid that owns it: with files, with git's own files, with its mount."""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from .scene import OWNER, BreachError, Scene, attack, denied, must

_CLONE_NEWUSER, _CLONE_NEWNS = 0x10000000, 0x00020000
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result


def _work(at: Scene, *verbs: str) -> Counter[int]:
    """What the daemon answers to the owner's own requests about this tree."""
    base = f"/v1/checkouts/{at.own['id']}"
    seen: Counter[int] = Counter()
    for verb in verbs or ("diff", "snapshots", "receipt", "reset"):
        posts = verb in {"snapshots", "reset"}
        status, answer = at.ask("POST" if posts else "GET", f"{base}/{verb}", {} if posts else None)
        must(status < 500 or status in {503, 504, 507}, f"{verb}: {status} {answer[:300]!r}")
        seen[status] += 1
    return seen


def _reset(at: Scene) -> None:
    status, answer = at.ask("POST", f"/v1/checkouts/{at.own['id']}/reset", {})
    must(status == 200, f"reset: {status} {answer[:300]!r}")
    clean = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-c", "safe.directory=*", "status", "--porcelain", "--ignored"],
        cwd=at.tree, env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"}, capture_output=True, check=False,
    )  # fmt: skip
    must(clean.returncode == 0 and not clean.stdout, f"not clean: {clean!r}")


@attack(OWNER)
def set_uid_files_and_devices_are_made(at: Scene) -> str:
    shell = at.tree / "shell"
    shell.write_bytes(Path("/bin/true").read_bytes())
    shell.chmod(0o6755)
    flags = os.statvfs(at.tree).f_flag
    must(flags & os.ST_NOSUID and flags & os.ST_NODEV, f"mounted without nosuid,nodev: {flags:x}")
    made = denied(
        lambda: os.mknod(at.tree / "sda", 0o660 | stat.S_IFBLK, os.makedev(8, 0)),
        lambda: os.setxattr(at.tree / "shell", "security.capability", b"\1\0\0\2" + b"\xff" * 16),
    )
    _reset(at)
    return f"nosuid, nodev; {made}"


@attack(OWNER)
def hard_links_lead_out(at: Scene) -> str:
    return denied(
        lambda: os.link("/etc/passwd", at.tree / "passwd"),
        lambda: os.link(at.tree / ".git/HEAD", "/tmp/redteam-head"),
    )


@attack(OWNER)
def links_are_raced(at: Scene) -> str:
    """A directory and a link to a trap are exchanged while the daemon reads and writes."""
    inner = at.tree / "racing"
    inner.mkdir()
    (inner / "evil").write_text("x\n")
    (at.tree / "away").symlink_to(at.trap)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            _libc.renameat2(-100, bytes(inner), -100, bytes(at.tree / "away"), 2)
            time.sleep(0.0005)

    racer = threading.Thread(target=exchange)
    racer.start()
    patch = b"--- /dev/null\n+++ b/racing/n%d\n@@ -0,0 +1 @@\n+x\n"
    seen: Counter[int] = Counter()
    try:
        for turn in range(25):
            seen += _work(at, "diff", "snapshots")
            base = f"/v1/checkouts/{at.own['id']}"
            status, answer = at.ask("POST", f"{base}/apply", raw=patch % turn)
            must(status < 500, f"apply: {status} {answer[:300]!r}")
            seen[status] += 1
    finally:
        stop.set()
        racer.join()
    _reset(at)
    return f"openat2 beneath the tree, as the owner: {dict(seen)}; the trap is empty"


@attack(OWNER)
def git_is_told_to_run_things(at: Scene) -> str:
    """By configuration, hooks, attributes, an alternate and a linked directory."""
    canary = Path("/tmp/redteam-ran")
    run = f"touch {canary}"
    git_dir = at.tree / ".git"
    keys = ("core.fsmonitor", "core.pager", "core.sshCommand", "filter.x.clean", "filter.x.smudge",
            "filter.x.process", "diff.external", "diff.x.textconv", "merge.x.driver", "gpg.program",
            "core.alternateRefsCommand", "core.editor", "alias.diff", "core.askPass")  # fmt: skip
    lines = [f'[{s}{f" {q}" if q else ""}]\n\t{k} = "{run};:"\n' for s, q, k in map(_split, keys)]
    (git_dir / "config").write_text("".join(lines) + "[core]\n\thooksPath = hooks\n")
    hooks = git_dir / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "pre-commit", "post-index-change", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\n{run}\n")
        (hooks / name).chmod(0o755)
    (at.tree / ".gitattributes").write_text("* filter=x diff=x merge=x\n")
    (git_dir / "objects/info").mkdir(exist_ok=True)
    (git_dir / "objects/info/alternates").write_text(f"{at.state}/mirrors\n")
    seen = _work(at)
    subprocess.run(["rm", "-rf", git_dir], check=True)
    git_dir.symlink_to(at.trap)
    seen += _work(at)
    _reset(at)
    must(not canary.exists(), "it ran")
    return f"no git of ours reads it: {dict(seen)}"


def _split(key: str) -> tuple[str, str, str]:
    section, _, rest = key.partition(".")
    middle, _, name = rest.rpartition(".")
    return section, f'"{middle}"' if middle else "", name


@attack(OWNER)
def trees_are_made_to_choke_on(at: Scene) -> str:
    """Depth, holes, pipes, sockets, unreadable directories, an index of junk, names with escapes."""
    top = os.open(at.tree, os.O_RDONLY)
    here = os.dup(top)
    for _ in range(500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with (at.tree / "hole").open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(at.tree / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(at.tree)
        listener.bind("socket")
    (at.tree / "a\x1b]0;owned\x07\n| b").write_text("x")
    (at.tree / ".git/index").write_bytes(b"DIRC\0\0\0\2\xff\xff\xff\xff" * 1000)
    (at.tree / "locked").mkdir(mode=0)
    began = time.monotonic()
    seen = _work(at, "diff", "snapshots", "receipt")
    subprocess.run(["rm", "-rf", at.tree / "d"], check=False)
    seen += _work(at, "diff", "snapshots")
    _reset(at)
    at.must_live()
    return f"{dict(seen)} in {time.monotonic() - began:.1f} s"


@attack(OWNER)
def overlays_are_confused(at: Scene) -> str:
    """Whiteouts, opaque directories and redirects, as the kernel itself writes them."""
    first = next(path for path in at.tree.iterdir() if path.name != ".git")
    seen = []
    for name in ("trusted.overlay.opaque", "trusted.overlay.redirect", "trusted.overlay.metacopy"):
        seen.append(denied(lambda n=name: os.setxattr(at.tree, n, b"/etc")))  # type: ignore[misc]
    for name in ("user.overlay.opaque", "user.overlay.redirect"):
        try:
            os.setxattr(at.tree, name, b"/etc")
        except OSError as error:
            seen.append(str(error.strerror))
    try:
        os.mknod(at.tree / "whiteout", stat.S_IFCHR, 0)
    except OSError as error:
        seen.append(str(error.strerror))
    first.rename(at.tree / "moved")
    (at.tree / "moved").rename(first)
    _work(at)
    _reset(at)
    return ", ".join(sorted(set(seen)))


@attack(OWNER)
def a_file_of_root_is_in_the_diff(at: Scene) -> str:
    """Root put `hidden` there, with mode 0600, and SECRET in it."""
    status, answer = at.ask("GET", f"/v1/checkouts/{at.own['id']}/diff")
    must(b"SECRET" not in answer, "it was shown")
    must(status == 403, f"{status} {answer[:200]!r}")
    code: str = json.loads(answer)["code"]
    _reset(at)
    return f"403 {code}"


@attack(OWNER)
def a_user_namespace_opens_doors(at: Scene) -> str:
    """As its root: an overlay over the state, the tree unmounted, file handles, a remount."""
    try:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
    except OSError as error:
        return f"no user namespaces here: {error.strerror}"
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {OWNER} 1")
    state, tree = bytes(at.state), bytes(at.tree)
    options = b"lowerdir=%s/mirrors:%s" % (state, state)
    mount_into = ctypes.create_string_buffer(128)
    return denied(
        lambda: os.listdir(at.state / "mirrors"),
        lambda: Path(at.victim["path"], "secret").read_text(),
        lambda: _call("mount", b"o", b"/tmp", b"overlay", 0, options),
        lambda: _call("umount2", tree, 2),
        lambda: _call("mount", b"", tree, None, 32, None),  # MS_REMOUNT without nosuid
        lambda: _call("open_by_handle_at", -100, mount_into, 0),
    )


@attack(OWNER)
def the_attached_mount_leads_elsewhere(at: Scene) -> str:
    """The descriptor of `attach`: upwards by `..`, and as root of a user namespace by a remount."""
    fd = _attached(at)
    steps, here = 0, fd
    try:
        for steps in range(8):  # noqa: B007
            here = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=here)
            outside = [
                name for name in ("etc/passwd", "leases", "mirrors") if _is_there(here, name)
            ]
            must(not outside, f"found {outside} above the mount")
        up = "is its own parent"
    except OSError as error:
        up = f"{errno.errorcode[error.errno or 0]} at step {steps + 1} upwards"
    seen = []
    place = tempfile.mkdtemp(prefix="redteam-")
    try:
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {OWNER} 1")
        _call("syscall", 429, fd, b"", -100, os.fsencode(place), 4)  # move_mount
        entries = set(os.listdir(place))
        must(not entries & {"leases", "mirrors", "etc"}, f"{entries}")
    except OSError as error:
        seen.append(str(error))
    return f"{up}; {', '.join(seen) or 'attached, there is nothing else in it'}"


def _is_there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory)
    except OSError:
        return False
    return True


def _attached(at: Scene) -> int:
    body = b"{}"
    head = (
        f"POST /v1/checkouts/{at.own['id']}/attach HTTP/1.1\r\nhost: m\r\ncontent-length: 2\r\n\r\n"
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(at.socket))
        connection.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received.partition(b"\r\n\r\n")[2]:
            data, passed, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(16))
            received += data
            for _, _, packed in passed:
                descriptors = array.array("i")
                descriptors.frombytes(packed)
                return descriptors[0]
            if not data:
                break
    raise BreachError(f"no descriptor came: {received[:300]!r}")


_PROBE = r"""
import ctypes, errno, json, os, socket, sys
state, sock, tree, pid = sys.argv[1:5]
out = {}
def probe(name, work):
    try: out[name] = repr(work())
    except OSError as error: out[name] = "-" + errno.errorcode.get(error.errno, "?")
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    if libc.syscall(*words) == -1: raise OSError(ctypes.get_errno(), "")
def connect(address):
    kind = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
    with socket.socket(kind) as s: s.settimeout(3); s.connect(address)
probe("state", lambda: os.listdir(state))
probe("socket", lambda: connect(sock))
probe("network", lambda: connect(("1.1.1.1", 53)))
probe("abstract", lambda: connect("\0redteam"))
probe("home", lambda: os.listdir("/root"))
probe("shadow", lambda: open("/etc/shadow").read())
probe("outer process", lambda: os.kill(int(pid), 0))
probe("namespace", lambda: call(272, 0x10000000))
probe("mount", lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, 0))
probe("key", lambda: call(249, b"user", b"redteam", None, 0) )
probe("userfaultfd", lambda: call(323, 0))
probe("bpf", lambda: call(321, 0, 0, 0))
probe("kernel module", lambda: call(175, 0, 0, b""))
probe("io_uring", lambda: call(425, 1, 0))
probe("environment of who started it", lambda: open("/proc/1/environ", "rb").read())
probe("memory of pid 1", lambda: open("/proc/1/mem", "rb"))
probe("trace of pid 1", lambda: call(101, 16, 1, 0, 0))
probe("disk", lambda: os.open("/dev/sda", os.O_RDONLY))
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", "60901"])
print(json.dumps(out))
"""


@attack(OWNER)
def a_sandbox_is_left(at: Scene) -> str:
    """By files, sockets, the network, signals, namespaces, keys, pid 1; and a process stays behind."""
    _libc.syscall(248, b"user", b"redteam", b"secret", 6, -4)  # add_key in the user's keyring
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0redteam")
    abstract.listen()
    words = [str(at.state), str(at.socket), str(at.tree), str(os.getpid())]
    done = subprocess.run(
        [at.mirrord, "--socket", str(at.socket), "exec", at.own["id"], "--", "/usr/bin/python3", "-c", _PROBE, *words],
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    abstract.close()
    if done.returncode:
        return f"nothing ran: {done.stderr.strip()[:150]}"
    seen = json.loads(done.stdout)
    through = {name: what for name, what in seen.items() if not what.startswith("-")}
    must(not through, f"{through}")
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _command(entry) == b"sleep\x0060901\0"
    ]
    must(not left, f"processes {left} are left")
    return ", ".join(sorted({what[1:] for what in seen.values()})) + "; no process is left"


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


_IN_CONTAINER = r"""
set -u
cd /work/tree
cp /bin/true shell; chown 0:0 shell; chmod 6755 shell
mknod disk b 8 0 2>/dev/null; mknod mem c 1 1 2>/dev/null
for pack in .git/objects/pack/*; do chmod u+w "$pack"; echo junk >>"$pack"; done
chown -R 0:0 . 2>/dev/null; chattr +i README 2>/dev/null
ls /work; ls /work/.. | tr '\n' ' '; cat /proc/1/root/etc/shadow 2>&1 | head -1
"""


@attack(0)
def root_of_a_container_writes_its_checkout(at: Scene) -> str:
    """Of one that mounts the checkout's directory, with docker's capabilities."""
    directory = at.own["directory"]
    caps = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,sys_chroot,mknod,setfcap"
    bounding = "-all," + ",".join(f"+{cap}" for cap in caps.split(","))
    root = Path("/tmp/redteam-root")
    script = (
        f"set -e; mkdir -p {root}; mount -t tmpfs none {root}; cd {root}; mkdir usr work proc etc tmp;"
        f" for l in bin lib lib64 sbin; do ln -s usr/$l $l; done; mount --rbind -o ro /usr usr;"
        f" mount --rbind {directory} work; mount -t proc none proc;"
        f" exec setpriv --bounding-set=\"{bounding}\" --inh-caps=-all chroot {root} /bin/sh -c '{_IN_CONTAINER}'"
    )
    ran = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    root.rmdir()
    must("root:" not in ran.stdout, f"it read the host's files: {ran.stdout[-200:]}")
    flags = os.statvfs(at.tree).f_flag
    must(flags & os.ST_NOSUID and flags & os.ST_NODEV, "set-id files and devices count")
    fresh = at.check_out(OWNER)
    sound = subprocess.run(
        ["git", "-c", "safe.directory=*", "fsck", "--full"],
        cwd=fresh["path"],
        capture_output=True,
        check=False,
    )
    at.ask("DELETE", f"/v1/checkouts/{fresh['id']}")
    must("tree" in ran.stdout, f"the container did not run: {ran.stderr[-300:]}")
    must(sound.returncode == 0, f"another checkout is damaged: {sound.stderr[:200]!r}")
    _reset(at)
    return "nosuid, nodev; what it wrote is its own checkout's, and a reset undoes it"


# -- what is kept, proven and applied --------------------------------------------------------------


@attack(OWNER)
def set_id_bits_are_kept_in_a_snapshot(at: Scene) -> str:
    shell = at.tree / "shell"
    shell.write_bytes(b"#!/bin/sh\n")
    shell.chmod(0o6755)
    base = f"/v1/checkouts/{at.own['id']}"
    status, answer = at.ask("POST", f"{base}/snapshots", {"name": "set-id"})
    must(status == 201, f"{status} {answer[:200]!r}")
    status, answer = at.ask("POST", f"{base}/reset", {"to": "set-id"})
    must(status == 200, f"{status} {answer[:200]!r}")
    mode = stat.S_IMODE(shell.stat().st_mode)
    at.ask("DELETE", f"{base}/snapshots/set-id")
    must(mode == 0o755, f"{mode:o}")
    return "0755"


@attack(OWNER)
def a_change_is_hidden_from_the_reset(at: Scene) -> str:
    """The same size and times, in a file and in a pack; a new process keeps the file open."""
    first = next(path for path in at.tree.iterdir() if path.is_file() and path.stat().st_size)
    pack = next((at.tree / ".git/objects/pack").glob("*.pack"))
    before = {path: path.read_bytes() for path in (first, pack)}
    with first.open("rb+") as kept:
        for path, content in before.items():
            was = path.stat()
            path.chmod(0o644)
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        _reset(at)
        kept.write(b"later")
        kept.flush()
        must({path: path.read_bytes() for path in before} == before, "it is still there")
    return "content is as it was; what was kept open leads to the old tree"


@attack(OWNER)
def a_later_commit_is_looked_for(at: Scene) -> str:
    """In every object of the store, by its name, and in the mirror."""
    words = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}

    def run(*more: str) -> subprocess.CompletedProcess[bytes]:
        command = [*words, *more]
        return subprocess.run(command, cwd=at.tree, env=environment, capture_output=True)

    listed = run("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").stdout.split()
    closure = run("rev-list", "--objects", "--no-object-names", "HEAD").stdout.split()
    must(
        listed and {*listed} == {*closure}, f"{len(listed)} objects, {len(closure)} of the closure"
    )
    got = [
        run("cat-file", "-e", at.later),
        run("fetch", f"{at.state}/mirrors/{at.mirror}", at.later),
    ]
    must(all(each.returncode for each in got), "it was found")
    must(not (at.tree / ".git/objects/info/alternates").exists(), "there is an alternate")
    return f"the store is the closure: {len(listed)} objects"


@attack(OWNER)
def a_patch_writes_outside(at: Scene) -> str:
    names = ("../out", "/etc/out", ".git/hooks/x", ".GIT/config", "a/../../out", "git~1/config")
    seen = set()
    for name in ("inside", *names):
        patch = (
            f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
            "@@ -0,0 +1 @@\n+x\n"
        )
        path = f"/v1/checkouts/{at.own['id']}/apply"
        status, answer = at.ask("POST", path, raw=patch.encode())
        if name == "inside":
            must(status == 200, f"{name}: {status} {answer[:200]!r}")
            continue
        must(400 <= status < 500, f"{name}: {status} {answer[:200]!r}")
        seen.add(f"{status} {json.loads(answer)['code']}")
    must(not (at.tree / ".git/hooks/x").exists(), "a hook was written")
    _reset(at)
    return ", ".join(sorted(seen))


@attack(0)
def traps_are_laid_for_root(at: Scene) -> str:
    """Modules, a configuration and a git configuration in the tree in which root runs mirrord."""
    canary = Path("/tmp/redteam-trap-ran")
    code = f"open({str(canary)!r}, 'w')\n"
    for name in ("json", "socket", "mirrord", "sitecustomize", "usercustomize", "subprocess"):
        (at.tree / f"{name}.py").write_text(code)
    for name in ("config.toml", "mirrord.toml", "mirrord/config.toml"):
        (at.tree / name).parent.mkdir(exist_ok=True)
        (at.tree / name).write_text(f'socket = "{at.trap}/s"\n')
    program = at.tree / "git"
    program.write_text(f"#!/bin/sh\ntouch {canary}\n")
    program.chmod(0o755)
    environment = {
        "PATH": "::.:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "XDG_CONFIG_HOME": ".",
    }
    seen = []
    for words in (["status"], ["diff", "."], ["verify-seal", ".", "--base", at.own["commit"]]):
        done = subprocess.run(
            [at.mirrord, *words], cwd=at.tree, env=environment, capture_output=True, timeout=35
        )
        seen.append(done.returncode)
        must(b"\x1b" not in done.stdout + done.stderr, f"{words}: escapes")
    must(not canary.exists(), "it ran")
    return f"statuses {seen}"
