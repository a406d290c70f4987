"""A daemon and its clients in a container as docker and Kubernetes make one by default, as root and as an ordinary user."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_engines import IMAGE, why_no_podman
from gitrepos import Upstream
from pods import Pod, pod
from python_packages import wheel

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_podman()), reason=why_no_podman()),
]

INSTANCE, USER = "psf__name-1", 1000
PLACES = {"root": (0, "landlock"), "user": (USER, "landlock"), "no landlock": (0, "uid")}
TESTS = "diff --git a/t b/t\nnew file mode 100644\n--- /dev/null\n+++ b/t\n@@ -0,0 +1 @@\n+test\n"
PATCH = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+new\n"
PROGRAM = "import sys\ndef main(): print(sys.prefix, sys.path[-1])\n"
SCRIPTS = "[console_scripts]\ntiny = tiny:main\n"
# What an agent tries; `secret` is a file of the daemon's state that its user may read.
ATTEMPTS = """
import ctypes, json, os, signal, socket, sys
secret, other, daemon = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
done = {}
def attempt(name, call):
    try:
        call()
        done[name] = True
    except OSError:
        done[name] = False
def trace():
    if libc.ptrace(16, int(daemon), 0, 0) < 0:
        raise OSError
def unshare():
    if libc.unshare(0x10000000) < 0:
        raise OSError
attempt("write the tree", lambda: open("made", "w").close())
attempt("write home", lambda: open(os.path.expanduser("~/made"), "w").close())
attempt("write temporary", lambda: open(os.environ["TMPDIR"] + "/made", "w").close())
attempt("read the state", lambda: open(secret).read())
attempt("read another tree", lambda: open(other).read())
attempt("read the shadow", lambda: open("/etc/shadow").read())
attempt("use the network", lambda: socket.socket())
attempt("signal the daemon", lambda: os.kill(int(daemon), 0))
attempt("trace the daemon", trace)
attempt("read the daemon's variables", lambda: open(f"/proc/{daemon}/environ").read())
attempt("make a namespace", unshare)
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
print(json.dumps({"uid": os.getuid(), "done": done, "caps": status["CapEff"] + status["CapBnd"][:0],
    "nnp": status["NoNewPrivs"], "isolation": os.environ["MIRRORD_ISOLATION"]}))
"""
_ALLOWED = {"write the tree", "write home", "write temporary"}


def _row_with_environment(upstream: Upstream) -> dict[str, object]:
    """Its environment has a program and a path file that names the tree; installing makes a file."""
    test = "import unittest\nimport demo\nimport made\nclass Case(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(demo.x, made.y)\n"
    base = upstream.commit({"demo.py": "x = 1\n", "src/own.py": "", ".gitignore": "made.py\n"})
    fixed = upstream.commit({"demo.py": "x = 2\n"})
    tested = upstream.commit({"test_demo.py": test})
    gold, tests = (f"{upstream.git('diff', *pair)}\n" for pair in ((base, fixed), (fixed, tested)))
    site = "$VIRTUAL_ENV/lib/python3.11/site-packages"
    return {
        "instance_id": "acme__demo-1", "repo": "acme/demo", "base_commit": base, "version": "1",
        "patch": gold, "test_patch": tests, "PASS_TO_PASS": "[]",
        "FAIL_TO_PASS": ["test_it (test_demo.Case.test_it)"],
        "install_config": {
            "python": "3.11", "pip_packages": ["tiny"], "log_parser": "unittest",
            "install": f"echo /testbed/src >{site}/own.pth && echo y = 2 >/testbed/made.py",
            "test_cmd": "python -m unittest -v",
        },
    }  # fmt: skip


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Pod, int, str]]:
    """A pod with a daemon, a mirror and a data set; the daemon's user, and the best isolation."""
    user, isolation = PLACES[request.param]
    root = Path(tempfile.mkdtemp(prefix="pod-"))
    root.chmod(0o755)
    try:
        upstream = Upstream(root / "psf/name")
        base = upstream.history(4)[1]
        row = {
            "instance_id": INSTANCE, "repo": "psf/name", "base_commit": base, "version": "1",
            "patch": PATCH, "test_patch": TESTS, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]",
        }  # fmt: skip
        (root / "rows.jsonl").write_text(json.dumps(row) + "\n")
        (root / "patch").write_text(PATCH)
        wheel(root / "packages", "tiny", "1.0", {"tiny.py": PROGRAM}, SCRIPTS)
        settings = f'[environments]\nindex = "{root}/packages"\nnetwork = false\n'
        (root / "config.toml").write_text(settings)
        project = Upstream(root / "acme/demo")
        (root / "demo.jsonl").write_text(json.dumps(_row_with_environment(project)))
        with pod(root, has_landlock=request.param != "no landlock") as made:
            made.serve(user)
            added = ("mirror", "add", "psf/name", "--url", f"file://{upstream.path}")
            made.must(*added, user=user)
            made.must("dataset", "import", f"{root}/rows.jsonl", "--name", "rows", user=user)
            added = ("mirror", "add", "acme/demo", "--url", f"file://{project.path}")
            made.must(*added, user=user)
            made.must("dataset", "import", f"{root}/demo.jsonl", "--name", "demo", user=user)
            yield made, user, isolation
    finally:
        shutil.rmtree(root)


def test_the_first_session(place: tuple[Pod, int, str]) -> None:
    """Checkout, change, diff, reset, grade, release."""
    made, user, _ = place
    tree = made.must("checkout", INSTANCE, user=user).strip()
    held = made.json("checkouts", user=user)
    assert [(lease["path"], lease["backend"]) for lease in held] == [(tree, "pool")]
    made.run("sh", "-c", f"echo new >{tree}/n; rm {tree}/README", user=user)
    assert "deleted file" in made.must("diff", tree, user=user)
    assert made.must("reset", tree, user=user).strip() == tree
    assert made.must("diff", tree, user=user) == ""
    graded = made.json("grade", INSTANCE, "--patch", f"{made.root}/patch", user=user)
    listed = made.run("ls", graded["path"], user=user).stdout.split()
    assert {"n", "t"} <= {*listed}
    made.must("release", tree, graded["path"], user=user)
    assert made.json("checkouts", user=user) == []


def test_a_command_reaches_its_tree_and_little_else(place: tuple[Pod, int, str]) -> None:
    made, user, isolation = place
    other = made.must("checkout", INSTANCE, user=user).strip()
    state = Path(other).parents[2]
    found = made.run("pgrep", "--oldest", "--full", "mirrord.daemon", user=user)
    pid = found.stdout.strip()
    script = ("/usr/bin/python3", "-c", ATTEMPTS, f"{state}/catalog.sqlite3", f"{other}/README")
    ran = made.mirrord("exec", INSTANCE, "--", *script, pid, user=user)
    assert ran.returncode == 0, ran
    assert ran.stderr.count(f"isolation {isolation}") == 1
    answer = json.loads(ran.stdout)
    assert {name for name, is_done in answer["done"].items() if is_done} == _ALLOWED
    assert answer["isolation"] == isolation
    assert (answer["nnp"], int(answer["caps"], 16)) == ("1", 0)
    assert (answer["uid"] == USER) if user else (answer["uid"] >= 61184)
    made.must("release", other, user=user)


def test_nothing_of_a_command_outlives_it(place: tuple[Pod, int, str]) -> None:
    """Its background processes, its scratch directory, its checkout."""
    made, user, _ = place
    left = "setsid sleep 7654 & (sleep 7654 &) ; echo $TMPDIR; exit 3"
    ran = made.mirrord("exec", INSTANCE, "--", "sh", "-c", left, user=user)
    assert ran.returncode == 3, ran
    assert "sleep 7654" not in made.run("ps", "-eo", "args").stdout
    assert made.run("test", "-e", ran.stdout.strip()).returncode == 1
    assert made.json("checkouts", user=user) == []


def test_an_isolation_that_is_impossible_is_refused(place: tuple[Pod, int, str]) -> None:
    made, user, isolation = place
    refused = {"namespaces", *(() if isolation == "landlock" else {"landlock"})}
    refused |= {"uid"} if user else set()  # an ordinary user cannot become another
    for asked in ("namespaces", "landlock", "uid", "none"):
        ran = made.mirrord("exec", INSTANCE, "--isolation", asked, "--", "true", user=user)
        assert ran.returncode == (7 if asked in refused else 0), (asked, ran)
        assert (f"cannot isolate the command by {asked}" in ran.stderr) == (asked in refused)
        assert "has no namespaces" not in ran.stderr  # it was demanded


def test_git_works_in_a_held_tree(place: tuple[Pod, int, str]) -> None:
    """Also where its objects are those of the sealed store, outside the tree."""
    made, user, _ = place
    tree = made.must("checkout", INSTANCE, user=user).strip()
    listed = made.must("exec", tree, "--", "git", "log", "--oneline", user=user)
    assert len(listed.splitlines()) == 2
    made.must("release", tree, user=user)


def test_a_signal_and_a_timeout_end_all_of_it(place: tuple[Pod, int, str]) -> None:
    made, user, _ = place
    slow = ("exec", INSTANCE, "--timeout", "2s", "--", "sh", "-c", "sleep 8765 & wait")
    ran = made.mirrord(*slow, user=user)
    assert (ran.returncode, "killed after" in ran.stderr) == (137, True), ran
    assert "sleep 8765" not in made.run("ps", "-eo", "args").stdout


def test_the_doctor_and_the_status_name_the_place(place: tuple[Pod, int, str]) -> None:
    """And no remedy needs what a pod cannot do."""
    made, user, _ = place
    here = "user" if user else "container"
    done = made.mirrord("doctor", user=user)
    first, *_, last = done.stdout.splitlines()
    assert (f"{here}: " in first, f"place: {here}" in last) == (True, True), done
    remedies = " ".join(
        check["remedy"] for check in json.loads(made.mirrord("doctor", "--json", user=user).stdout)
    )
    for remedy in ("as root", "mirrord-mount", "systemctl", "MKNOD"):  # impossible, or for nothing
        assert remedy not in remedies
    assert made.json("status", user=user)["health"]["place"] == here


FORGED = "from mirrord.host.ctimes import may_forge_ctimes; print(may_forge_ctimes())"


def test_mknod_forges_no_ctime_where_no_disk_can_be_opened(place: tuple[Pod, int, str]) -> None:
    """A process of another control group has not been tried."""
    made, user, _ = place
    if user:
        return  # its trees are not root's
    made.run("sh", "-c", "(true &); exec true")  # the container's first process waits for no other
    assert made.python("-c", FORGED).stdout == "False\n"
    beside = made.engine("run", "--detach", f"--pid=container:{made.name}", IMAGE, "sleep", "600")
    try:
        assert made.python("-c", FORGED).stdout == "True\n"
    finally:
        made.engine.remove(beside)


SANDBOX = """
import json, sys, warnings
from mirrord import Client, Sandbox
with warnings.catch_warnings(record=True) as warned, Client() as client:
    warnings.simplefilter("always")
    with client.checkout(sys.argv[1], owner=int(sys.argv[2]) or None) as held, Sandbox(held) as box:
        ran = box.exec("pwd; echo $HOME; echo x >new; cat", cwd="/testbed", input=b"in")
        box.write("/testbed/a/b", b"written")
        box.write("/tmp/c", b"temporary")
        late = box.exec("sleep 100", timeout=0.5)
        print(json.dumps({
            "printed": ran.stdout.decode().splitlines(), "isolation": ran.isolation, "path": str(held.path),
            "tree": box.at("/testbed"), "read": [held.read("a/b").decode(), box.read("/tmp/c").decode()],
            "new": "+++ b/new" in held.diff().decode(), "struck": late.struck,
            "warned": [str(each.message) for each in warned],
        }))
"""


def test_a_sandbox_of_the_client(place: tuple[Pod, int, str]) -> None:
    """Its paths are mapped: those of the tree, HOME and /tmp."""
    made, user, isolation = place
    ran = made.python("-c", SANDBOX, INSTANCE, "0" if user else "61000", user=user)
    assert ran.returncode == 0, ran
    answer = json.loads(ran.stdout)
    path, home, given = answer["printed"]
    assert path == answer["path"] == answer["tree"]
    assert given == "in"
    assert home.endswith("/home")
    assert answer["isolation"] == isolation
    assert answer["read"] == ["written", "temporary"]
    assert answer["new"]
    assert answer["struck"] == "time"
    assert [f"isolation {isolation}" in warning for warning in answer["warned"]] == [True]
    assert not made.run("sh", "-c", "ls -d /tmp/mirrord-sandbox-*").stdout


def test_an_environment_is_a_copy_beside_the_tree(place: tuple[Pod, int, str]) -> None:
    """Built and prepared; then shown, changed, forked and reset without any mount."""
    made, user, _ = place
    instance = "acme__demo-1"
    made.must("environment", "build", instance, user=user)
    owner = () if user else ("--owner", "61000")
    held = made.json("checkout", instance, "--environment", "auto", *owner, user=user)
    assert (held["backend"], held["layer"][:12]) == ("pool", "environment-")
    tree, prefix = held["path"], f"{held['directory']}/environment"

    def tiny(checkout: str) -> str:
        return made.must("exec", checkout, "--", "sh", "-c", "cat made.py; tiny", user=user)

    def shown(path: str) -> str:
        return f"y = 2\n{path}/environment {path}/tree/src\n"

    assert (tiny(tree), made.must("diff", tree, user=user)) == (shown(held["directory"]), "")
    broken = f"rm {prefix}/bin/tiny; cp {prefix}/bin/python {prefix}/bin/other; echo $VIRTUAL_ENV >{prefix}/bin/mine; rm made.py"
    assert made.must("exec", tree, "--", "sh", "-c", broken, user=user) == ""
    forked = made.json("fork", tree, user=user)
    listed = "cd $VIRTUAL_ENV/bin; cat mine; ls tiny ../../tree/made.py; ./other -c 'print(1)'"
    there = made.mirrord("exec", forked["path"], "--", "sh", "-c", listed, user=user)
    assert there.stdout == f"{forked['directory']}/environment\n1\n", there
    made.must("reset", tree, user=user)
    assert tiny(tree) == shown(held["directory"])
    assert made.run("test", "-e", f"{prefix}/bin/other").returncode == 1
    refused = made.mirrord("environment", "remove", instance, user=user)
    assert "2 checkouts have it" in refused.stderr, refused
    made.must("release", tree, forked["path"], user=user)


def test_tests_of_a_row_run_without_a_mount(place: tuple[Pod, int, str]) -> None:
    made, user, _ = place
    done = made.mirrord("rehearse", "--run", "--dataset", "demo", user=user)
    assert ("1 ready" in done.stdout, "mirrord: the sandbox has" in done.stderr) == (True, True), (
        done
    )
    assert "RuntimeWarning" not in done.stderr
