"""The volume driver, called as docker and podman do; tests/integrations uses the engines."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import daemon
from volume_driver import VolumeWorld, volume_world
from waiting import until

from mirrord.places import DOCKER_SOCKET

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VolumeWorld]:
    with volume_world(tmp_path_factory.mktemp("volumes")) as world:
        yield world


@pytest.fixture
def world(shared: VolumeWorld) -> Iterator[VolumeWorld]:
    yield shared
    for name in shared.names():
        assert shared.call("Remove", Name=name)["Err"] == ""
    assert shared.checkouts() == {}


def test_the_handshake(world: VolumeWorld) -> None:
    status, headers, body = world.raw("Plugin.Activate", b"")
    assert (status, json.loads(body)) == (200, {"Err": "", "Implements": ["VolumeDriver"]})
    assert headers["content-type"] == "application/vnd.docker.plugins.v1.1+json"
    assert world.call("Capabilities")["Capabilities"] == {"Scope": "local"}


def test_an_answer_is_of_the_type_that_was_asked_for(world: VolumeWorld) -> None:
    for minor in ("", ".1", ".2"):
        kind = f"application/vnd.docker.plugins.v1{minor}+json"
        _, headers, _ = world.raw("VolumeDriver.List", b"{}", f"Accept: {kind}")
        assert headers["content-type"] == kind


def test_a_chunked_body_is_read(world: VolumeWorld) -> None:
    body = b'c\r\n{"Name":"a",\r\n1e\r\n"Opts":{"instance":"o__r-0"}}\n\n\r\n0\r\n\r\n'
    body = body.replace(b"1e\r\n", b"%x\r\n" % len(b'"Opts":{"instance":"o__r-0"}}\n\n'))
    status, _, _ = world.raw("VolumeDriver.Create", body, "Transfer-Encoding: chunked")
    assert (status, world.names()) == (200, ["a"])


def test_a_volume_from_its_making_to_its_removal(world: VolumeWorld) -> None:
    assert world.create("task", instance="o__r-0", uid="4321", ttl="1h") == ""
    checkout = world.checkouts()["task"]
    assert (checkout.instance, checkout.owner_uid) == ("o__r-0", 4321)
    assert (checkout.expires_at - checkout.created_at).total_seconds() == 3600
    found = world.call("Get", Name="task")["Volume"]
    assert (found["Name"], found["Mountpoint"]) == ("task", checkout.path)
    assert world.call("List")["Volumes"] == [found]
    assert world.call("Path", Name="task")["Mountpoint"] == checkout.path
    for mount in ("one", "two", "two"):  # docker asks again where the connection broke
        assert world.call("Mount", Name="task", ID=mount)["Mountpoint"] == checkout.path
    for mount, left in (("two", 1), ("two", 1), ("one", 0)):
        world.call("Unmount", Name="task", ID=mount)
        assert world.call("Get", Name="task")["Volume"]["Status"]["mounts"] == left
    world.call("Remove", Name="task")
    assert (world.names(), world.checkouts()) == ([], {})


def test_a_name_says_the_instance_where_no_option_does(world: VolumeWorld) -> None:
    assert (world.create("o__r-1"), world.create("o__r-1--second")) == ("", "")
    assert {each.instance for each in world.checkouts().values()} == {"o__r-1"}


def test_the_same_request_again_is_the_same_volume(world: VolumeWorld) -> None:
    assert [world.create("a", instance="o__r-0") for _ in range(2)] == ["", ""]
    assert len(world.checkouts()) == 1
    assert "exists with other options" in world.create("a", instance="o__r-1")


def test_a_client_that_hangs_up_removes_no_volume_that_was_there(world: VolumeWorld) -> None:
    world.create("a", instance="o__r-0")
    before = world.checkouts()["a"].id
    body = b'{"Name": "a", "Opts": {"instance": "o__r-0"}}'
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(world.plugin))
            head = f"POST /VolumeDriver.Create HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
    assert world.checkouts()["a"].id == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"instance": "o__r-99"}, "cannot find instance 'o__r-99'"),
        ({"instance": "o__r-0", "sise": "1", "owner": "x"}, "sise: Unexpected keyword"),
        ({"instance": "o__r-0", "ttl": "soon"}, "ttl: 'soon' is not a duration"),
        ({"instance": "o__r-0", "what": "../leases"}, "`what` is one of tree, environment"),
        ({"instance": "o__r-0", "bind": "process"}, "cannot be bound to a process"),
        ({"instance": "o__r-0", "what": "environment"}, "its checkout has no environment"),
        ({"fork": "o__r-0", "owner": "1"}, "owner: Unexpected keyword"),
        ({"checkout": "aaaaaaaaaaaaaaaa"}, "cannot find checkout"),
        ({"checkout": "aaaaaaaaaaaaaaaa", "ttl": "1h"}, "ttl: "),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    world: VolumeWorld, options: dict[str, str], said: str
) -> None:
    assert said in world.create("a", **options)
    assert world.checkouts() == {}


def test_bad_calls_are_answered(world: VolumeWorld) -> None:
    assert world.raw("VolumeDriver.Nothing", b"{}")[0] == 500
    for body in (b"nonsense", b"[]", b'{"Name": "../x"}', b'{"Name": 3}'):
        status, _, content = world.raw("VolumeDriver.Create", body)
        assert status == 500
        assert "cannot read the body" in json.loads(content)["Err"]
    assert "it has no name" in world.create("", instance="o__r-0")
    for verb in ("Get", "Path", "Mount"):
        assert "cannot find volume 'gone'" in world.call(verb, Name="gone", ID="x")["Err"]
    for verb in ("Unmount", "Remove"):  # it expired, and the engine tidies up
        assert world.call(verb, Name="gone", ID="x")["Err"] == ""


def test_a_volume_of_a_held_checkout_releases_nothing(world: VolumeWorld) -> None:
    with world.client as client, client.checkout("o__r-0") as checkout:
        assert world.create("mine", checkout=checkout.id) == ""
        assert world.call("Path", Name="mine")["Mountpoint"] == str(checkout.path)
        world.call("Remove", Name="mine")
        assert world.names() == []
        assert checkout.path.is_dir()


def test_the_last_of_several_volumes_releases_their_checkout(world: VolumeWorld) -> None:
    world.create("tree", instance="o__r-0")
    assert world.create("all", checkout="tree", what="directory") == ""
    (checkout,) = world.checkouts().values()
    assert world.call("Path", Name="all")["Mountpoint"] == checkout.directory
    world.call("Remove", Name="tree")
    assert list(world.checkouts()) == ["all"]
    world.call("Remove", Name="all")
    assert world.checkouts() == {}


@pytest.mark.root
def test_the_environment_of_a_checkout_is_a_volume_of_its_own(world: VolumeWorld) -> None:
    world.create("tree", instance="o__r-0", environment="tools", owner="4321")
    assert world.create("its", checkout="tree", what="environment") == ""
    place = Path(world.call("Mount", Name="its", ID="a")["Mountpoint"])
    assert place == Path(world.checkouts()["tree its"].directory, "environment")
    assert ((place / "bin/tool").read_text(), (place / "bin").stat().st_uid) == ("tool\n", 4321)
    world.call("Unmount", Name="its", ID="a")


def test_a_fork_of_a_volume_has_its_content_and_its_own_name(world: VolumeWorld) -> None:
    world.create("first", instance="o__r-0")
    Path(world.checkouts()["first"].path, "new").write_text("work\n")
    assert world.create("second", fork="first") == ""
    held = world.checkouts()
    assert Path(held["second"].path, "new").read_text() == "work\n"
    world.call("Remove", Name="first")
    assert list(world.checkouts()) == ["second"]


def test_a_mounted_volume_outlives_its_ttl(world: VolumeWorld) -> None:
    world.create("held", instance="o__r-0", ttl="500ms")
    world.call("Mount", Name="held", ID="a")
    world.create("idle", instance="o__r-0", ttl="500ms")
    before = world.checkouts()["held"].expires_at
    until(lambda: world.names() == ["held"])
    assert world.checkouts()["held"].expires_at > before
    world.call("Unmount", Name="held", ID="a")
    until(lambda: world.names() == [])


def test_volumes_and_their_mounts_outlive_the_daemon(world: VolumeWorld) -> None:
    world.create("task", instance="o__r-0", owner="4321")
    world.call("Mount", Name="task", ID="a")
    before = world.call("Get", Name="task")["Volume"]
    world.daemon.kill()
    world.start()
    assert world.call("List")["Volumes"] == [before]
    assert world.create("task", instance="o__r-0", owner="4321") == ""
    world.call("Unmount", Name="task", ID="a")
    assert world.call("Get", Name="task")["Volume"]["Status"]["mounts"] == 0


def test_a_kill_at_any_step_leaves_no_checkout_without_its_volume(world: VolumeWorld) -> None:
    for delay_s in (0.002, 0.006):
        names = [f"v{number}" for number in range(8)]
        callers = [threading.Thread(target=_try_to_create, args=(world, name)) for name in names]
        for caller in callers:
            caller.start()
        time.sleep(delay_s)
        world.daemon.kill()
        for caller in callers:
            caller.join()
        world.start()
        assert sorted(world.checkouts()) == sorted(world.names())
        for name in names:
            assert world.create(name, instance="o__r-0") == ""
            assert world.call("Remove", Name=name)["Err"] == ""
        assert world.checkouts() == {}


def _try_to_create(world: VolumeWorld, name: str) -> None:
    try:
        world.create(name, instance="o__r-0")
    except (OSError, ValueError):
        pass


@pytest.mark.root
def test_only_administrators_are_served(world: VolumeWorld) -> None:
    world.plugin.chmod(0o666)
    world.daemon.root.chmod(0o755)
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.setresuid(65534, 65534, 65534)
        os.write(write, world.raw("VolumeDriver.List", b"{}")[2])
        os._exit(0)
    os.waitpid(pid, 0)
    assert "only administrators" in os.read(read, 65536).decode()
    os.close(read)
    os.close(write)


@pytest.mark.root
def test_a_daemon_of_root_serves_where_docker_looks(tmp_path: Path) -> None:
    with Path("/run/lock/mirrord-tests-docker").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if DOCKER_SOCKET.exists():
            pytest.skip("a daemon of this machine serves there")
        with daemon("[docker]\nvolumes = true\n") as running:
            assert DOCKER_SOCKET.stat().st_mode & 0o777 == 0o600
            with daemon("[docker]\nvolumes = true\n") as second:  # it lives without
                reasons = second.json("GET", "/v1/health")["reasons"]
                assert any("volumes are not served" in reason for reason in reasons)
            running.stop()
            assert not DOCKER_SOCKET.exists()


def test_a_socket_that_systemd_passes_serves_nothing_while_volumes_are_off() -> None:
    with daemon(start=False) as running:
        world = VolumeWorld(running, [])
        world.start()
        assert "[docker] volumes is false" in world.call("List")["Err"]
