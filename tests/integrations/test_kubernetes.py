"""The CSI plugin: gRPC over its Unix socket as a kubelet speaks it, a real daemon, mounts of real namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes_node import Node, node, until_released
from waiting import until

from mirrord import errors
from mirrord.integrations.kubernetes import csi_pb2 as csi
from mirrord.integrations.kubernetes.server import code_of

pytestmark = pytest.mark.root

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("kubernetes")) as made:
        yield made


@pytest.fixture
def on(serving: Node) -> Iterator[Node]:
    yield serving
    if serving.daemon.process is None:  # a test failed half-way
        serving.start_daemon()
    serving.clean()


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[Code, str]:
    """The code and the message of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value.code(), str(caught.value.details())


def in_pod(on: Node, place: Path, script: str) -> str:
    return on.pod(place, script).communicate(timeout=60)[0]


# -- what a node plugin says of itself ----------------------------------------------------------------


def test_the_plugin_names_itself_and_its_node(on: Node) -> None:
    assert on.identity.GetPluginInfo(csi.GetPluginInfoRequest()).name == "csi.mirrord.dev"
    assert on.node.NodeGetInfo(csi.NodeGetInfoRequest()).node_id == "node-1"
    capabilities = on.identity.GetPluginCapabilities(csi.GetPluginCapabilitiesRequest())
    assert list(capabilities.capabilities) == []  # no controller
    assert list(on.node.NodeGetCapabilities(csi.NodeGetCapabilitiesRequest()).capabilities) == []
    assert refusal(on.node.NodeStageVolume, csi.NodeStageVolumeRequest())[0] is Code.UNIMPLEMENTED


def test_the_plugin_is_ready_while_its_daemon_answers(on: Node) -> None:
    probe = csi.ProbeRequest()
    assert on.identity.Probe(probe).ready.value is True
    on.kill_daemon()
    assert on.identity.Probe(probe).ready.value is False
    on.start_daemon()
    assert on.identity.Probe(probe).ready.value is True


# -- publish, use, unpublish --------------------------------------------------------------------------


def test_a_pod_works_in_its_checkout_and_nothing_is_left_of_it(on: Node) -> None:
    """Each call may come twice: the second finds what the first did."""
    place = on.publish("csi-1", instance="o__r-1", owner="4321")
    (held,) = on.client.list_checkouts()
    assert (held.label, held.instance, held.owner_uid) == ("csi/csi-1", "o__r-1", 4321)
    script = "setpriv --reuid=4321 --regid=4321 --clear-groups env HOME=/ sh -c 'echo mine >new && git status --short'"
    assert in_pod(on, place, script) == "?? new\n"
    assert b"+mine" in on.client.diff_checkout(held.id)
    assert on.publish("csi-1", instance="o__r-1", owner="4321") == place
    assert [each.id for each in on.client.list_checkouts()] == [held.id]
    assert (place / "new").read_text() == "mine\n"
    for _ in range(2):
        on.unpublish("csi-1")
        assert (on.labels(), on.mounts(), place.exists()) == ([], [], False)


def test_a_recorded_commit_of_a_repository_is_published(on: Node) -> None:
    place = on.publish("csi-1", repo="o/r", commit=on.commits[0], history="squashed")
    (held,) = on.client.list_checkouts()
    assert (held.mirror, held.commit, held.history) == ("o__r", on.commits[0], "squashed")
    assert in_pod(on, place, "git -c safe.directory=/mnt log --oneline | wc -l") == "1\n"


def test_an_environment_is_beside_the_tree(on: Node) -> None:
    """A container mounts each by `subPath`, which binds the directory below."""
    place = on.publish("csi-1", instance="o__r-0", environment="tools")
    assert sorted(os.listdir(place)) == ["environment", "tree"]
    assert (place / "environment/bin/tool").read_text() == "tool\n"
    assert "README" in in_pod(on, place / "tree", "ls")
    on.unpublish("csi-1")
    assert (on.labels(), on.mounts(), place.exists()) == ([], [], False)


def test_a_running_pod_follows_resets_in_the_directory_of_both(on: Node) -> None:
    """With `mountPropagation: HostToContainer`; a tree by itself is the old one until a restart."""
    place = on.publish("csi-1", instance="o__r-0", what="directory")
    (held,) = on.client.list_checkouts()
    script = "cat tree/README; echo mine >tree/new; echo ready; read _; cat tree/README; ls tree"
    pod = on.pod(place, script, propagation="slave")
    assert pod.stdout is not None
    before = [pod.stdout.readline(), pod.stdout.readline()]
    on.kill_daemon()
    on.start_daemon()  # in a namespace of its own, as the next container's
    on.client.reset_checkout(held.id, "o__r-1")
    after = pod.communicate("\n", timeout=60)[0]
    expected = (place / "tree/README").read_text()
    assert before[1] == "ready\n"
    assert after.startswith(expected)
    assert expected != before[0]
    assert "new" not in after

    tree = on.publish("csi-2", instance="o__r-0")
    (held,) = on.client.list_checkouts("csi/csi-2")
    on.client.reset_checkout(held.id, "o__r-1")
    assert in_pod(on, tree, "cat README") == expected


@pytest.mark.parametrize("what", ["tree", "directory"])
def test_a_read_only_volume_cannot_be_written_to_even_after_a_reset(on: Node, what: str) -> None:
    place = on.publish("csi-1", instance="o__r-0", what=what, read_only=True)
    (held,) = on.client.list_checkouts()
    file = place / "tree/new" if what == "directory" else place / "new"
    refused = "Read-only file system"
    assert refused in in_pod(on, place, f"touch {file.relative_to(place)} 2>&1 || :")
    on.client.reset_checkout(held.id, "o__r-1")
    with pytest.raises(OSError, match=refused):
        file.write_text("")
    on.publish("csi-1", instance="o__r-0", what=what, read_only=True)
    code, message = refusal(on.publish, "csi-1", instance="o__r-0", what=what)
    assert (code, "with other attributes" in message) == (Code.ALREADY_EXISTS, True)
    on.unpublish("csi-1")
    assert on.mounts() == []


def test_a_fork_of_a_pods_checkout_outlives_the_pod(on: Node) -> None:
    on.publish("csi-1", instance="o__r-0")
    (held,) = on.client.list_checkouts()
    fork = on.client.fork_checkout(held.id, auto_renew=False)
    on.publish("csi-1", instance="o__r-0")  # it does not take the fork for the pod's
    on.unpublish("csi-1")
    assert [each.id for each in on.client.list_checkouts()] == [fork.id]


def test_a_hundred_pods_start_at_once(on: Node) -> None:
    names = [f"csi-{number}" for number in range(100)]
    threads = [
        threading.Thread(target=on.publish, args=(name,), kwargs={"instance": "o__r-0"})
        for name in names
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {(on.place(name) / "README").exists() for name in names} == {True}
    assert len(on.labels()) == 100
    for name in names:
        on.unpublish(name)
    assert (on.labels(), on.mounts()) == ([], [])


# -- crashes ------------------------------------------------------------------------------------------


def test_a_volume_outlives_the_plugin_and_the_daemon(on: Node) -> None:
    """Both are killed while a pod runs; it goes on, and the calls that follow find its checkout."""
    place = on.publish("csi-1", instance="o__r-0")
    pod = on.pod(place, "echo one >new; echo ready; read _; echo two >>new; cat new")
    assert pod.stdout is not None
    assert pod.stdout.readline() == "ready\n"
    before = on.client.list_checkouts()
    on.stop(signal.SIGKILL)
    on.kill_daemon()
    on.start_daemon()
    on.start()
    on.publish("csi-1", instance="o__r-0")
    assert on.client.list_checkouts()[0].id == before[0].id
    assert pod.communicate("\n", timeout=60)[0] == "one\ntwo\n"
    assert (place / "new").read_text() == "one\ntwo\n"
    on.stop(signal.SIGKILL)
    on.kill_daemon()
    on.start_daemon()
    on.start()
    on.unpublish("csi-1")
    assert (on.labels(), on.mounts(), place.exists()) == ([], [], False)


def test_a_call_without_a_daemon_is_unavailable_and_succeeds_later(on: Node) -> None:
    place = on.publish("csi-1", instance="o__r-0")
    on.kill_daemon()
    for call in (lambda: on.publish("csi-2", instance="o__r-0"), lambda: on.unpublish("csi-1")):
        code, message = refusal(call)
        assert (code, "mirrord serve" in message) == (Code.UNAVAILABLE, True)
    on.start_daemon()
    on.publish("csi-2", instance="o__r-0")
    on.unpublish("csi-1")
    assert (on.labels(), place.exists()) == (["csi/csi-2"], False)


def test_a_checkout_taken_just_before_a_crash_is_published_by_the_next_call(on: Node) -> None:
    """The daemon had answered, or not, and nothing was attached yet."""
    taken = on.client.checkout("o__r-0", label="csi/csi-1", attach=True, auto_renew=False)
    on.publish("csi-1", instance="o__r-0")
    assert [each.id for each in on.client.list_checkouts()] == [taken.id]


def test_a_volume_is_published_again_after_its_mount_was_lost(on: Node) -> None:
    """As a restart of the node leaves it: the lease with the pod's work, and no mount."""
    place = on.publish("csi-1", instance="o__r-0")
    (place / "new").write_text("mine")
    while on.mounts():
        subprocess.run(["umount", str(place)], check=True)
    on.publish("csi-1", instance="o__r-0")
    assert (place / "new").read_text() == "mine"


def test_a_volume_whose_checkout_was_released_gets_a_new_one(on: Node) -> None:
    place = on.publish("csi-1", instance="o__r-0")
    on.client.release_checkout(on.client.list_checkouts()[0].id)
    until(lambda: not (place / "README").exists())
    on.publish("csi-1", instance="o__r-0")
    assert (place / "README").exists()
    assert len(on.mounts()) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_calls_that_come_again_end_well_whoever_is_killed_when(on: Node) -> None:
    """A kubelet asks until it is done: then each volume has one checkout, and in the end none."""
    names = [f"csi-{number}" for number in range(6)]
    ended = threading.Event()

    def keep_asking(call: Callable[[str], object], name: str) -> None:
        while True:
            try:
                call(name)
                return
            except grpc.RpcError as error:
                assert error.code() in {Code.UNAVAILABLE, Code.ABORTED, Code.CANCELLED}, error
                time.sleep(0.05)

    def keep_calling(name: str) -> None:
        while not ended.is_set():
            keep_asking(lambda volume: on.publish(volume, instance="o__r-0"), name)
            keep_asking(on.unpublish, name)
        keep_asking(lambda volume: on.publish(volume, instance="o__r-0"), name)

    threads = [threading.Thread(target=keep_calling, args=(name,)) for name in names]
    for each in threads:
        each.start()
    for number in range(2):
        time.sleep(0.5 + number / 7)
        on.kill_daemon()
        on.start_daemon()
        time.sleep(0.3 + number / 7)
        on.stop(signal.SIGKILL)
        on.start()
    ended.set()
    for each in threads:
        each.join()
    assert sorted(map(str, on.labels())) == sorted(f"csi/{name}" for name in names)
    assert all((on.place(name) / "README").exists() for name in names)
    assert len(on.mounts()) == 2 * len(names)
    for name in names:
        on.unpublish(name)
    assert (on.labels(), on.mounts()) == ([], [])


def test_leases_of_mounted_volumes_are_renewed_and_others_expire(on: Node) -> None:
    on.stop()
    on.start("--ttl", "4s")
    try:
        stays = on.publish("csi-1", instance="o__r-0")
        vanished = on.publish("csi-2", instance="o__r-0")
        subprocess.run(["umount", "--lazy", str(vanished)], check=True)
        subprocess.run(["umount", "--lazy", str(vanished)], check=True)
        until_released(on, "csi-2")
        began = time.monotonic()
        while time.monotonic() < began + 6:
            assert on.labels() == ["csi/csi-1"], on.log_path.read_text()
            time.sleep(0.1)
        assert (stays / "README").exists()
        on.unpublish("csi-2")
        assert not vanished.exists()
    finally:
        on.stop()
        on.start()


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "allowed"),
    [
        ({"instance": "o__r-0", "view": "grader"}, "what"),
        ({}, "give instance, or repo with commit"),
        ({"repo": "o/r"}, "give instance, or repo with commit"),
        ({"commit": "main", "instance": "o__r-0"}, "give instance, or repo with commit"),
        ({"instance": "o__r-0", "repo": "o/r", "commit": "main"}, "give instance, or repo with commit"),
        ({"instance": "o__r-0", "history": "linked"}, "sealed or squashed"),
        ({"instance": "o__r-0", "owner": "root"}, "the uid of"),
        ({"instance": "o__r-0", "owner": str(2**32)}, "the uid of"),
        ({"instance": "o__r-0", "what": "environment"}, "tree or directory"),
        ({"instance": "o__r-0", "csi.storage.k8s.io/ephemeral": "false"}, "volumes: - csi:"),
        ({"instance": "o__r-0", "csi.storage.k8s.io/ephemeral": ""}, "volumes: - csi:"),
    ],
)  # fmt: skip
def test_attributes_that_are_not_allowed_are_refused_with_those_that_are(
    on: Node, attributes: dict[str, str], allowed: str
) -> None:
    code, message = refusal(on.publish, "csi-1", **attributes)
    assert (code, allowed in message) == (Code.INVALID_ARGUMENT, True), message
    assert (on.labels(), on.place("csi-1").exists()) == ([], False)


@pytest.mark.parametrize(
    "capability",
    [
        {},
        {"mount": {}},
        {"block": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}},
        {"mount": {}, "access_mode": {"mode": "MULTI_NODE_MULTI_WRITER"}},
        {"mount": {"fs_type": "ext4"}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}},
    ],
)
def test_a_volume_is_a_directory_on_one_node(on: Node, capability: dict[str, object]) -> None:
    wrong = capability or {"access_mode": {"mode": "SINGLE_NODE_WRITER"}}
    assert refusal(on.publish, "csi-1", instance="o__r-0", capability=wrong)[0] is Code.INVALID_ARGUMENT  # fmt: skip


@pytest.mark.parametrize(
    "target", ["", "relative", "/", "/etc", "{k}", "{k}/", "{k}/../x", "{k}/./x", "{k}/link/x", "/proc/self"]
)  # fmt: skip
def test_nothing_is_published_outside_the_kubelets_directory(on: Node, target: str) -> None:
    link = on.kubelet / "link"
    link.unlink(missing_ok=True)
    link.symlink_to("/tmp")
    target = target.format(k=on.kubelet)
    code, message = refusal(on.publish, "csi-1", target, instance="o__r-0")
    assert (code, str(on.kubelet) in message) == (Code.INVALID_ARGUMENT, True)
    assert refusal(on.unpublish, "csi-1", target)[0] is Code.INVALID_ARGUMENT
    assert on.labels() == []


def test_the_kubelets_directory_may_be_behind_a_link(on: Node) -> None:
    link = on.daemon.root / "link"
    link.symlink_to(on.kubelet)
    target = link / on.place("csi-1").relative_to(on.kubelet)
    on.stop()
    on.start("--kubelet", str(link))
    try:
        for _ in range(2):
            on.publish("csi-1", target, instance="o__r-0")
        assert len(on.mounts()) == 2
        on.unpublish("csi-1", target)
        assert (on.labels(), on.mounts()) == ([], [])
    finally:
        on.stop()
        on.start()


@pytest.mark.parametrize("volume", ["", "-a", "a/b", "a b", "a" * 129])
def test_an_id_that_is_none_is_refused(on: Node, volume: str) -> None:
    place = on.place("some")
    assert refusal(on.publish, volume, place, instance="o__r-0")[0] is Code.INVALID_ARGUMENT
    assert refusal(on.unpublish, volume, place)[0] is Code.INVALID_ARGUMENT


def test_a_directory_at_the_target_is_used_and_anything_else_is_refused(on: Node) -> None:
    place = on.place("csi-1")
    place.mkdir()
    on.publish("csi-1", instance="o__r-0")
    on.unpublish("csi-1")
    assert not place.exists()
    place.write_text("")
    assert refusal(on.publish, "csi-1", instance="o__r-0")[0] is Code.INVALID_ARGUMENT
    assert (place.exists(), on.labels()) == (True, [])
    place.unlink()
    place.symlink_to("/etc")
    code, message = refusal(on.publish, "csi-1", instance="o__r-0")
    assert (code, "symbolic link" in message) == (Code.INVALID_ARGUMENT, True)
    assert (place.is_symlink(), on.labels()) == (True, [])
    place.unlink()
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "other", str(place)], check=True)
    code, message = refusal(on.unpublish, "csi-1")
    assert (code, "something else is mounted" in message) == (Code.ABORTED, True)


def test_what_the_daemon_does_not_know_is_not_found(on: Node) -> None:
    code, message = refusal(on.publish, "csi-1", instance="o__r-9")
    assert (code, "o__r-9" in message) == (Code.NOT_FOUND, True)
    assert refusal(on.publish, "csi-1", repo="o/none", commit="main")[0] is Code.NOT_FOUND
    environment = {"instance": "o__r-0", "environment": "none"}
    assert refusal(on.publish, "csi-1", **environment)[0] is Code.NOT_FOUND
    assert (on.labels(), on.place("csi-1").exists()) == ([], False)


def test_a_volume_is_at_one_path(on: Node) -> None:
    place = on.publish("csi-1", instance="o__r-0")
    code, message = refusal(on.publish, "csi-1", on.place("other"), instance="o__r-0")
    assert (code, str(place) in message) == (Code.FAILED_PRECONDITION, True)


def test_of_two_calls_for_one_volume_the_second_is_aborted(on: Node) -> None:
    """The first goes on though its kubelet waits no longer; others wait for nothing but the daemon."""
    on.signal_daemon(signal.SIGSTOP)
    try:
        assert refusal(_publish_at_once, on, "csi-1")[0] is Code.DEADLINE_EXCEEDED
        assert refusal(_publish_at_once, on, "csi-1")[0] is Code.ABORTED
        assert refusal(on.unpublish, "csi-1")[0] is Code.ABORTED
        assert refusal(_publish_at_once, on, "csi-2")[0] is Code.DEADLINE_EXCEEDED
    finally:
        on.signal_daemon(signal.SIGCONT)
    until(lambda: len(on.mounts()) == 4)
    until(lambda: _has_published(on, "csi-1"))
    assert sorted(map(str, on.labels())) == ["csi/csi-1", "csi/csi-2"]


def _has_published(on: Node, volume: str) -> bool:
    """The mount of the first call is there a moment before that call ends."""
    try:
        on.publish(volume, instance="o__r-0")
    except grpc.RpcError as error:
        assert error.code() is Code.ABORTED
        return False
    return True


def _publish_at_once(on: Node, volume: str) -> None:
    """With the patience of half a second."""
    request = csi.NodePublishVolumeRequest(
        volume_id=volume,
        target_path=str(on.place(volume)),
        volume_context={"csi.storage.k8s.io/ephemeral": "true", "instance": "o__r-0"},
        volume_capability={"mount": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}},
    )
    on.node.NodePublishVolume(request, timeout=0.5)


def test_every_error_of_the_daemon_has_a_code_of_grpc() -> None:
    codes = {each.code: code_of(each("cannot")) for each in errors.iter_errors(errors.MirrordError)}
    unexpected = {code for code, found in codes.items() if found is Code.INTERNAL}
    assert unexpected <= {"internal", "method-not-allowed"}
    expected = {
        "invalid-request": Code.INVALID_ARGUMENT,
        "not-allowed": Code.PERMISSION_DENIED,
        "instance-not-found": Code.NOT_FOUND,
        "checkout-busy": Code.ABORTED,
        "too-many-requests": Code.UNAVAILABLE,
        "overloaded": Code.UNAVAILABLE,
        "no-daemon": Code.UNAVAILABLE,
        "disk-full": Code.RESOURCE_EXHAUSTED,
        "quota-exceeded": Code.RESOURCE_EXHAUSTED,
        "deadline-exceeded": Code.DEADLINE_EXCEEDED,
        "commit-unservable": Code.FAILED_PRECONDITION,
    }
    assert {code: codes[code] for code in expected} == expected
