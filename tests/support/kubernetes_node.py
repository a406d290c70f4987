"""What a node has: daemon and CSI plugin in namespaces of containers, a kubelet's calls, pods' mounts.

Containers share with the host what `mountPropagation: Bidirectional` shares: the daemon its state
directory, the plugin the kubelet's directory. Neither sees the other's processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from daemons import Daemon, daemon
from mount_table import mount_lines
from volume_driver import put_environment, write_tasks
from waiting import until

from mirrord import Client
from mirrord.integrations.kubernetes import csi_pb2 as csi
from mirrord.integrations.kubernetes import csi_pb2_grpc as services

_CONTAINER = ("unshare", "--mount", "--propagation", "unchanged", "--pid", "--fork", "--kill-child", "--mount-proc")  # fmt: skip
_POD = 'mount --rbind $1 "$2" /mnt && cd /mnt && shift 2 && eval "$@"'


class Node:
    """A node whose daemon knows the instances `o__r-0` and `o__r-1`, and the environment `tools`."""

    def __init__(self, made: Daemon, commits: list[str]) -> None:
        self.daemon, self.commits = made, commits
        self.client = Client(made.socket)
        self.kubelet = made.root / "kubelet"
        self.endpoint = f"unix://{made.root}/csi.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.channel = grpc.insecure_channel(self.endpoint, [("grpc.max_reconnect_backoff_ms", 100)])  # fmt: skip
        self.identity = services.IdentityStub(self.channel)  # type: ignore[no-untyped-call]
        self.node = services.NodeStub(self.channel)  # type: ignore[no-untyped-call]

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "mirrord.integrations.kubernetes"]
        command += ["--endpoint", self.endpoint, "--node", "node-1"]
        command += ["--socket", str(self.daemon.socket), "--kubelet", str(self.kubelet), *arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen([*_CONTAINER, *command], stderr=log)
        ready = csi.GetPluginInfoRequest()
        self.identity.GetPluginInfo(ready, wait_for_ready=True, timeout=60)

    @property
    def log_path(self) -> Path:
        return self.daemon.root / "plugin.log"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send the plugin a signal, the first process of its namespace, and wait for its end."""
        assert self.process is not None
        os.kill(_inhabitant(self.process.pid), number)
        self.process.wait(20)
        self.process = None

    def start_daemon(self) -> None:
        self.daemon.start(prefix=_CONTAINER)

    def kill_daemon(self) -> None:
        self.signal_daemon(signal.SIGKILL)
        assert self.daemon.process is not None
        self.daemon.process.wait(20)
        self.daemon.process = None

    def signal_daemon(self, number: int) -> None:
        os.kill(_inhabitant(self.daemon.pid), number)

    def place(self, volume: str) -> Path:
        """Where a kubelet has a volume published; it makes all but the last directory."""
        place = self.kubelet / "pods" / volume / "volumes/kubernetes.io~csi/task/mount"
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def publish(
        self,
        volume: str,
        target: Path | str | None = None,
        *,
        read_only: bool = False,
        capability: dict[str, Any] | None = None,
        **attributes: str,
    ) -> Path:
        """As a kubelet asks for an inline volume of a pod; answers the path."""
        place = target if target is not None else self.place(volume)
        context = {
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.name": "agent",
            "csi.storage.k8s.io/pod.namespace": "default",
            **attributes,
        }
        plain = {"mount": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
        request = csi.NodePublishVolumeRequest(
            volume_id=volume,
            target_path=str(place),
            readonly=read_only,
            volume_context={key: value for key, value in context.items() if value},
            volume_capability=csi.VolumeCapability(**(capability or plain)),
        )
        self.node.NodePublishVolume(request, timeout=60)
        return Path(place)

    def unpublish(self, volume: str, target: Path | str | None = None) -> None:
        place = target if target is not None else self.place(volume)
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(place))
        self.node.NodeUnpublishVolume(request, timeout=60)

    def pod(
        self, place: Path, script: str, *, propagation: str = "private"
    ) -> subprocess.Popen[str]:
        """A container: the volume is bound at its working directory, in a namespace of its own."""
        enter = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", _POD, "sh"]
        made = f"--make-r{propagation}"
        return subprocess.Popen(
            [*enter, made, str(place), script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def mounts(self) -> list[str]:
        """What is mounted below the kubelet's directory, as the host sees it."""
        lines = mount_lines()
        return [line for line in lines if line.split()[4].startswith(f"{self.kubelet}/")]

    def labels(self) -> list[str | None]:
        return [each.label for each in self.client.list_checkouts()]

    def clean(self) -> None:
        for held in self.client.list_checkouts():
            self.client.release_checkout(held.id)
        for line in self.mounts():
            subprocess.run(["umount", "--lazy", line.split()[4]], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", str(self.kubelet / "pods")], check=True)


def _inhabitant(container: int) -> int:
    """The first process in a container."""
    return int(Path(f"/proc/{container}/task/{container}/children").read_text())


def _share(directory: Path) -> None:
    directory.mkdir()
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    subprocess.run(["mount", "--make-shared", str(directory)], check=True)


@contextmanager
def node(root: Path) -> Iterator[Node]:
    commits, settings = write_tasks(root)
    quiet = '[sync]\ninterval = "0"\n[audit]\ninterval = "0"\n'
    with daemon(settings + quiet, start=False) as made:
        on = Node(made, commits)
        _share(made.state_dir)
        _share(on.kubelet)
        put_environment(made.state_dir, "tools")
        try:
            on.start_daemon()
            on.client.wait(on.client.import_dataset(root / "rows.jsonl"))
            on.start()
            yield on
        finally:
            if on.process is not None:
                on.stop(signal.SIGKILL)
            on.channel.close()
            on.client.close()
            if made.process is not None:
                on.kill_daemon()
            for place in (on.kubelet, made.state_dir):
                subprocess.run(["umount", "--recursive", "--lazy", str(place)], check=True)


def until_released(made: Node, volume: str) -> None:
    until(lambda: f"csi/{volume}" not in made.labels(), told=lambda: made.log_path.read_text())
