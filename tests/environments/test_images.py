"""Images give the machine, checkouts give the tree: imported once, shared by layers, refused if hostile."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import images
import pytest
from gitrepos import git
from homes import home
from image_bench import Bench, image_bench, long
from ports import free_port
from sandbox_here import needs_sandbox
from waiting import until

from mirrord import Sandbox, protocol
from mirrord.errors import (
    ConflictError,
    DiskFullError,
    EnvironmentLeaksError,
    InvalidRequestError,
    UpstreamAuthError,
    UpstreamError,
    UsageError,
)
from mirrord.model import DiffFormat

MISSING = [name for name in ("skopeo", "umoci") if not shutil.which(name)]
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    needs_sandbox,
]
AGENT = 34541
BCRYPT = "$2b$04$3W8a2WaACChMaTtiW8HpcOFQ.ZV/tYEbddeDozFQiKEUhc.TGEuw2"
"""Of the password `secret`."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with image_bench(tmp_path_factory.mktemp("images")) as made:
        yield made


def test_a_checkout_stands_in_the_place_of_the_images_repository(bench: Bench) -> None:
    clone = bench.root / "testbed"
    subprocess.run(["git", "clone", "-q", bench.upstream.path, clone], check=True)
    try:
        assert bench.imported(f"dir:{bench.root}", "whole").failed == []
    finally:
        shutil.rmtree(clone)
    known = bench.client.get_environment("whole")
    assert known.image is not None
    assert (known.image.tree, known.image.repositories) == ("/testbed", ["/testbed"])
    assert (known.python, known.recipe) == (None, None)

    with (
        bench.client.checkout(f"o/r@{bench.base}", environment="whole", owner=AGENT) as checkout,
        Sandbox(checkout) as sandbox,
    ):
        said = sandbox.exec("id -u; pwd; cat README; git status --short; touch /etc/new /new new")
        assert said.stdout == b"0\n/testbed\n0\n", said
        hidden = Sandbox(checkout, workdir="/srv/app")
        found = hidden.exec(f"pwd; git -C /testbed cat-file -e {bench.future}")
        assert (found.stdout, found.exit_code) == (b"/srv/app\n", 1)
        hidden.close()
        checkout.reset()
        assert (
            sandbox.exec("ls /etc /new new").stdout.split()
            == b"/etc: gitconfig hosts passwd resolv.conf".split()
        )
        with pytest.raises(ConflictError):
            bench.client.remove_environment("whole")
    bench.remove("whole")


@pytest.fixture
def policy(bench: Bench) -> Iterator[Callable[[str], None]]:
    """Set `leaks`; `report` again at the end."""
    config = bench.made.config
    before = config.read_text()

    def put(leaks: str) -> None:
        config.write_text(before.replace("[environments]", f'[environments]\nleaks = "{leaks}"'))
        bench.client.reload()

    yield put
    config.write_text(before)
    bench.client.reload()


def test_what_came_after_the_commit_is_reported_hidden_or_refused(
    bench: Bench, policy: Callable[[str], None]
) -> None:
    secret = "the answer, which is long enough to be more than a coincidence\n" * 2
    later = bench.upstream.commit({"README": secret})
    other = secret.upper()
    members: list[images.Member] = [("opt/x", secret.encode(), {}), ("opt/y", other.encode(), {})]
    clone = bench.root / "srv/a/b/copy"
    subprocess.run(["git", "clone", "-q", bench.upstream.path, clone], check=True)
    try:
        packed = images.layer(members, above=bench.root)
    finally:
        shutil.rmtree(bench.root / "srv")
    images.oci(bench.place / "leaky", [packed])
    assert bench.imported(f"oci:{bench.place}/leaky", "leaky").failed == []
    bench.client.wait(bench.client.sync_mirror("o/r"))
    look = f"ls /opt /srv/a/b/copy; git -C /srv/a/b/copy cat-file -e {later}"

    def scans() -> list[protocol.EnvironmentScan]:
        return bench.client.get_environment("leaky").scans

    with bench.client.checkout(f"o/r@{bench.base}", environment="leaky", owner=AGENT) as checkout:
        until(scans)  # after the answer
        (scan,) = scans()
        found = {(each["kind"], each["path"]) for each in scan.findings}
        assert found == {
            ("future-file", "opt/x"), ("future-file", "srv/a/b/copy/README"),
            ("future-file", "srv/a/b/copy/lib/a"), ("repository", "srv/a/b/copy/.git"),
        }  # fmt: skip
        assert (scan.mirror, scan.commit, scan.count) == ("o__r", bench.base, 4)
        policy("hide")
        with Sandbox(checkout) as sandbox:
            said = sandbox.exec(look)
            assert (b"x\n" in said.stdout, b"README" in said.stdout) == (True, True)
            assert said.exit_code == 0
            for _ in range(2):
                checkout.reset()
                said = sandbox.exec(look)
                assert (b"x\n" in said.stdout, b"README" in said.stdout) == (False, False)
                assert (b"y\n" in said.stdout, said.exit_code) == (True, 128)
                sandbox.exec("touch /opt/x")
            newest = bench.upstream.commit({"README": other})
            bench.client.wait(bench.client.sync_mirror("o/r"))
            checkout.reset()
            assert b"y\n" not in sandbox.exec(look).stdout  # the mirror knows it by now
        policy("refuse")
        with pytest.raises(EnvironmentLeaksError, match="5 of its files"):
            checkout.reset()
    with (
        bench.client.checkout(f"o/r@{newest}", environment="leaky", owner=AGENT) as whole,
        Sandbox(whole) as sandbox,
    ):
        assert sandbox.exec(look).exit_code == 0  # nothing came after that
    bench.remove("leaky")
    assert bench.kept() == set()


@contextmanager
def cloned(bench: Bench, commit: str, tree: str = "testbed") -> Iterator[Path]:
    """Have a clone of the upstream in the root file system, at a commit."""
    clone = bench.root / tree
    subprocess.run(["git", "clone", "-q", bench.upstream.path, clone], check=True)
    subprocess.run(["git", "-C", clone, "checkout", "-q", commit], check=True)
    try:
        yield clone
    finally:
        shutil.rmtree(clone)


def test_what_the_image_has_besides_the_commit_is_there_and_in_no_diff(bench: Bench) -> None:
    """Also after a reset; nothing of a `.git` is, and no content of a later commit, also of one that
    the mirror learns of when the layer is there.
    """

    def findings_of(key: str) -> list[str]:
        (prepared,) = bench.client.get_environment(key).prepared
        assert prepared.commit == bench.base
        return sorted(each["path"] for each in prepared.findings)

    with cloned(bench, bench.base) as clone:
        files = {"lib/a.so": "built", "new/b": long(31), "new/.git/HEAD": "x", "README": "edited\n"}
        for path, content in {**files, "lib/answer": long(1), "new/answer": long(1)}.items():
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text(content)
        (clone / "lib/link").symlink_to("../README")
        (clone / "gone").unlink()
        assert bench.imported(f"dir:{bench.root}", "built").failed == []
    ask = "cat README lib/a.so new/b lib/link; ls -A . lib new; echo >> lib/a.so; echo >> README"
    shown = f"edited\nbuilt{long(31)}edited\n.:\n.git\nREADME\nlib\nnew\n\nlib:\na\na.so\nlink\n\nnew:\nb\n".encode()
    name = f"o/r@{bench.base}"
    with bench.client.checkout(name, environment="built", owner=AGENT) as checkout:
        assert checkout.diff() == b""
        with Sandbox(checkout) as sandbox:
            for _ in range(2):
                said = sandbox.exec(ask)
                assert said.stdout == shown, said
                changed = checkout.diff(format=DiffFormat.NAME_STATUS).split()
                assert changed == [b"M", b"README", b"M", b"lib/a.so"]
                checkout.reset()
        assert findings_of("built") == ["/testbed/lib/answer", "/testbed/new/answer"]
        before = bench.client.list_layers()
        bench.upstream.commit({"x": long(31)})
        bench.client.wait(bench.client.sync_mirror("o/r"))
        with (
            bench.client.checkout(name, environment="built", owner=AGENT) as second,
            Sandbox(second) as other, Sandbox(checkout) as sandbox,
        ):  # fmt: skip
            assert sandbox.exec("cat new/b").stdout == long(31).encode()
            checkout.reset()
            for box in (sandbox, other):
                assert box.exec("cat README lib/a.so; ls new").stdout == b"edited\nbuilt"
            assert second.diff() == b""
        assert "/testbed/new/b" in findings_of("built")
        assert len(bench.client.list_layers()) == len(before) + 1
    bench.remove("built")


def test_an_image_at_another_commit_leaves_the_base_commit_as_it_is(bench: Bench) -> None:
    with cloned(bench, bench.future) as clone:
        (clone / "built").write_text("built")
        (clone / "gone").unlink()
        assert bench.imported(f"dir:{bench.root}", "later").failed == []
    with (
        bench.client.checkout(f"o/r@{bench.base}", environment="later", owner=AGENT) as checkout,
        Sandbox(checkout) as sandbox,
    ):
        said = sandbox.exec("cat README lib/a built; ls gone")
        assert said.stdout.decode() == f"0\n{long(0)}built"
    (prepared,) = bench.client.get_environment("later").prepared
    (found,) = prepared.findings
    assert (found["kind"], found["path"]) == ("other-head", "/testbed")
    assert bench.future in found["detail"]
    assert "2 paths" in found["detail"]
    bench.remove("later")


def test_layers_are_unpacked_once_and_removed_with_the_last_image(bench: Bench) -> None:
    base = images.layer([("d/x", b"1", {}), ("d/y", b"2", {}), ("e", b"3", {})], above=bench.root)
    above = images.layer([
        ("d/.wh..wh..opq", b"", {}), ("d/z", b"4", {}), (".wh.e", b"", {}),
        ("su", b"5", {"mode": 0o4755, "uid": 9}), ("dev/sda", b"", {"type": tarfile.BLKTYPE}),
        ("etc/resolv.conf", b"", {"type": tarfile.SYMTYPE, "linkname": "/run/absent/resolv.conf"}),
        # a path twice: the last one counts, as for docker
        ("twice", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), ("twice", b"6", {}),
        ("d/z", b"7", {}),
    ])  # fmt: skip
    config = {"Env": ["A=b c", "PATH=/bin"], "User": "me", "WorkingDir": "/srv/app"}
    images.oci(bench.place / "one", [base])
    images.oci(bench.place / "two", [base, above], config)
    archive = shutil.make_archive(str(bench.place / "two"), "tar", bench.place / "two")
    saved = f"docker-archive:{bench.place}/one.tar"  # its layers are not compressed
    subprocess.run(["skopeo", "copy", f"oci:{bench.place}/one", f"{saved}:o/i:t"], check=True)
    assert bench.imported(saved, "one").failed == []
    (lowest,) = {name for name in bench.kept() if not name.endswith(".json")}
    inode = (bench.layers / lowest).stat().st_ino
    assert bench.imported(f"oci-archive:{archive}:image", "two").failed == []
    first, second = map(bench.client.get_environment, ("one", "two"))
    assert (second.shared_bytes, second.size_bytes - first.size_bytes) == (first.size_bytes, 4)
    assert second.dropped == {"set-id bits": 1}
    assert (bench.layers / lowest).stat().st_ino == inode
    rows = [each for each in bench.client.usage(verbose=True).rows if each.kind == "environments"]
    assert sum(each.size_bytes >= first.size_bytes for each in rows) == 2, "with all its layers"

    with (
        bench.client.checkout(f"o/r@{bench.base}", environment="two", owner=AGENT) as checkout,
        Sandbox(checkout) as sandbox,
    ):
        ask = 'id -u; id -g; pwd; echo "$A" "$HOME"; ls d /d; ls -ld /su; cat /twice /d/z; ls /e'
        lines = sandbox.exec(ask).stdout.decode().splitlines()
        assert lines[:4] == ["7", "8", "/srv/app", "b c /opt"]
        assert lines[4:6] == ["/d:", "z"]
        assert lines[6].startswith("-rwxr-xr-x 1 me ")
        assert lines[7:] == ["67"]

    bench.remove("one")
    assert lowest in bench.kept()
    bench.remove("two")
    assert bench.kept() == set()


def test_a_hostile_archive_is_refused(bench: Bench, tmp_path: Path) -> None:
    images.oci(tmp_path / "i", [images.layer([("/etc/x", b"", {})])])
    (failed,) = bench.imported(f"oci:{tmp_path}/i", "hostile").failed
    assert "which leads out of it" in failed.detail
    known = bench.client.get_environment("hostile")
    assert (known.state, known.error) == ("failed", failed.detail.partition(": ")[2])
    assert not [name for name in bench.kept() if name.startswith(".building")]
    bench.remove("hostile")


def test_a_full_disk_says_nothing_of_the_image(bench: Bench, tmp_path: Path) -> None:
    images.oci(tmp_path / "i", [images.layer([], above=bench.root)])
    bench.layers.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", bench.layers], check=True)
    try:
        with pytest.raises(DiskFullError):
            bench.imported(f"oci:{tmp_path}/i", "full")
    finally:
        subprocess.run(["umount", bench.layers], check=True)
    assert bench.imported(f"oci:{tmp_path}/i", "full").failed == []
    bench.remove("full")


def test_what_is_no_image_is_refused(bench: Bench, tmp_path: Path) -> None:
    images.oci(tmp_path / "i", [images.layer([("x", b"1", {})])])
    for blob in (tmp_path / "i/blobs/sha256").iterdir():
        if tarfile.is_tarfile(blob):
            blob.write_bytes(images.layer([("x", b"2", {})]))
    assert "digest" in bench.imported(f"oci:{tmp_path}/i", "forged").failed[0].detail.lower()
    (tmp_path / "x.tar").write_bytes(b"no archive")
    assert bench.imported(f"docker-archive:{tmp_path}/x.tar", "none").failed
    for name in ("forged", "none"):
        bench.remove(name)
    with pytest.raises(UsageError):
        bench.client.import_image("docker:x")
    with pytest.raises(FileNotFoundError):
        bench.client.import_image("dir:/absent")
    with pytest.raises(InvalidRequestError, match="control characters"):
        bench.client.wait(bench.client.import_image("docker://127.0.0.1:9/x:\x1b[1m"))
    with pytest.raises(UpstreamError, match="connection refused"):
        bench.client.wait(bench.client.import_image("docker://127.0.0.1:9/x"))


def test_an_ordinary_user_has_images_too() -> None:
    """In the user's own namespaces; what is not the user's in an archive becomes the user's."""
    members: list[images.Member] = [
        ("srv", None, {"uid": 9}), ("srv/x", b"x", {"mode": 0o4600}),
        ("testbed", None, {}), ("testbed/built", b"b", {"uid": 9}),
    ]  # fmt: skip

    secret = "the answer, which is long enough to be more than a coincidence\n" * 2
    members.append(("srv/answer", secret.encode(), {"mode": 0}))

    def fill(place: Path) -> None:
        upstream = place / "up/owner/name"
        git(upstream, "checkout", "--quiet", "-b", "later")
        (upstream / "a.txt").write_text(secret)
        git(upstream, "commit", "--quiet", "--all", "--message", "later")
        git(upstream, "checkout", "--quiet", "main")
        packed = images.layer([*members, ("e", b"", {})], above=images.root(place / "root"))
        config = {"Entrypoint": ["sh", "-c"], "Cmd": ["echo $HOSTNAME"]}
        images.oci(place / "image", [packed, images.layer([(".wh.e", b"", {})])], config)

    with home('[environments]\nleaks = "hide"\n', fill=fill) as made:
        made.cli("environment", "import", f"oci:{made.root}/image", "--key", "i")
        script = "id -u; pwd; cat a.txt built /srv/x; ls /e /srv/answer || touch /srv/y"
        options = ("owner/name@main", "--environment", "i", "--")
        assert made.cli("exec", *options, "sh", "-c", script) == "0\n/testbed\na\nbx"
        assert made.cli("exec", "--entrypoint", *options[:-1]) == "testbed\n"
        assert made.cli("exec", "--entrypoint", *options, "echo $0", "x") == "x\n"
        weak = made.run(
            "-m", "mirrord", "exec", "--isolation", "landlock", *options, "id", check=False
        )
        assert weak.returncode == 7
        assert "namespaces" in weak.stderr


@pytest.mark.skipif(not shutil.which("docker-registry"), reason="no docker-registry here")
def test_a_registry_asks_for_the_password_of_auth_file(bench: Bench, tmp_path: Path) -> None:
    images.oci(tmp_path / "i", [images.layer([("x", b"1", {})])])
    with registry(tmp_path) as host:
        copy = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"]
        target = f"docker://{host}/o/i:1"
        own = ["--dest-creds=me:secret", f"oci:{tmp_path}/i:image", target]
        subprocess.run([*copy, *own], check=True)
        with pytest.raises(UpstreamAuthError, match="authentication required"):
            bench.client.wait(bench.client.import_image(target))
        secret = base64.b64encode(b"me:secret").decode()
        bench.auth_file.write_text(json.dumps({"auths": {host: {"auth": secret}}}))
        assert bench.imported(target, "private").failed == []
    bench.remove("private")


@contextmanager
def registry(place: Path) -> Iterator[str]:
    """Run Debian's registry on loopback, for one user; yield its address."""
    host = f"127.0.0.1:{free_port()}"
    (place / "users").write_text(f"me:{BCRYPT}\n")
    config = {
        "version": 0.1, "http": {"addr": host}, "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": f"{place}/data"}},
        "auth": {"htpasswd": {"realm": "r", "path": f"{place}/users"}},
    }  # fmt: skip
    (place / "config.yml").write_text(json.dumps(config))
    with (place / "log").open("wb") as log:
        serving = subprocess.Popen(
            ["docker-registry", "serve", str(place / "config.yml")], stdout=log, stderr=log
        )
    try:
        until(lambda: is_listening(host), told=(place / "log").read_text)
        yield host
    finally:
        serving.kill()
        serving.wait()


def is_listening(host: str) -> bool:
    address, port = host.split(":")
    with socket.socket() as asking:
        return asking.connect_ex((address, int(port))) == 0
