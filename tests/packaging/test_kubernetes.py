"""packaging/kubernetes: what the API server takes, and what daemon, plugin and documents say as well."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sessions import section

import mirrord
from mirrord import config
from mirrord.integrations.kubernetes.server import NAME
from mirrord.integrations.kubernetes.volumes import ATTRIBUTES, read_attributes

PROJECT = Path(__file__).parents[2]
MANIFESTS = PROJECT / "packaging/kubernetes"
VALIDATE = PROJECT / ".venv/kubernetes/bin/kubernetes-validate"
PLACE = f"/var/lib/kubelet/plugins/{NAME}"


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(_text("mirrord.yaml"))}


@pytest.fixture(scope="module")
def containers(kinds: dict[str, Any]) -> dict[str, Any]:
    spec = kinds["DaemonSet"]["spec"]["template"]["spec"]
    return {each["name"]: each for each in spec["containers"]}


def _text(name: str) -> str:
    return (MANIFESTS / name).read_text()


def _mounts(container: dict[str, Any]) -> dict[str, str | None]:
    return {each["mountPath"]: each.get("mountPropagation") for each in container["volumeMounts"]}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_manifests_are_what_the_api_server_takes(version: str) -> None:
    if not VALIDATE.exists():
        pytest.skip("no schemas of Kubernetes here: `make harnesses`")
    command = [str(VALIDATE), "--strict", "-k", version, *map(str, MANIFESTS.glob("*.yaml"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(f"against version {version}") == 6


def test_the_driver_is_ephemeral_and_has_the_plugins_name(kinds: dict[str, Any]) -> None:
    driver = kinds["CSIDriver"]
    assert driver["metadata"]["name"] == NAME
    assert driver["spec"]["volumeLifecycleModes"] == ["Ephemeral"]
    assert driver["spec"]["attachRequired"] is False
    assert (
        driver["spec"]["podInfoOnMount"] is True
    )  # without it the kubelet does not say "ephemeral"


def test_daemon_plugin_and_kubelet_meet_at_the_same_places(
    kinds: dict[str, Any], containers: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(kinds["ConfigMap"]["data"]["config.toml"])
    settings = config.load(file)
    plugin = dict(each.split("=") for each in containers["csi"]["command"] if each.startswith("--"))
    registrar = dict(each.split("=") for each in containers["registrar"]["args"])
    assert plugin["--socket"] == str(settings.socket)
    assert plugin["--endpoint"] == f"unix://{registrar['--csi-address']}"
    assert registrar["--kubelet-registration-path"] == f"{PLACE}/csi.sock"
    spec = kinds["DaemonSet"]["spec"]["template"]["spec"]
    places = {each["name"]: each.get("hostPath", {}).get("path") for each in spec["volumes"]}
    assert places["plugin"] == PLACE
    for container, shared in (("mirrord", str(settings.state_dir)), ("csi", places["kubelet"])):
        assert _mounts(containers[container])[shared] == "Bidirectional"
        assert containers[container]["securityContext"]["privileged"] is True
        assert containers[container]["image"] == f"mirrord:{mirrord.__version__}"
        assert str(settings.socket.parent) in _mounts(containers[container])


def test_the_plugin_takes_what_the_examples_ask_for() -> None:
    pod = yaml.safe_load(_text("pod.yaml"))
    documented = re.findall(r"^```yaml\n(.*?)^```", _document(), re.DOTALL | re.MULTILINE)
    (shown,) = (yaml.safe_load(each) for each in documented)
    for volume in (*pod["spec"]["volumes"], *shown["volumes"]):
        assert volume["csi"]["driver"] == NAME
        ephemeral = {"csi.storage.k8s.io/ephemeral": "true"}
        read_attributes({**volume["csi"]["volumeAttributes"], **ephemeral})
    user = pod["spec"]["securityContext"]["runAsUser"]
    assert pod["spec"]["volumes"][0]["csi"]["volumeAttributes"]["owner"] == str(user)


def test_every_attribute_is_documented() -> None:
    cells = re.findall(r"^\| (`.*?) \|", _document(), re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(ATTRIBUTES)


def _document() -> str:
    return section("docs/integrations.md", "Kubernetes")
