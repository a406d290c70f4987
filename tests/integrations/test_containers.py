"""Checkouts as volumes of a real podman and a real dockerd: what docs/integrations.md says of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import container_engines
import pytest
from accounts import accounts
from container_engines import Engine
from volume_driver import VolumeWorld, volume_world

import mirrord

pytestmark = [pytest.mark.root, pytest.mark.slow]

_MINI_SWE_AGENT = """
import json, sys
from minisweagent.environments.docker import DockerEnvironment
environment = DockerEnvironment(**json.loads(sys.argv[1]))
print(environment.execute({"command": "cat README; echo work > new"})["output"], end="")
environment.cleanup = lambda: None  # a shell in the background; the test removes its container
"""
_GIT_OF_ROOT = """
export HOME=/tmp; exec 2>&1
git status --short; git config --global --add safe.directory /testbed; git status --short
"""
PROJECT = Path(__file__).parents[2]
AGENT, USER = 4321, 4320


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VolumeWorld]:
    with volume_world(tmp_path_factory.mktemp("containers")) as world:
        yield world


def _engine(name: str, world: VolumeWorld) -> Iterator[Engine]:
    reason = (
        container_engines.why_no_podman() if name == "podman" else container_engines.why_no_docker()
    )
    if reason:
        pytest.skip(reason)
    with (container_engines.podman if name == "podman" else container_engines.dockerd)(
        world.plugin
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def podman_engine(world: VolumeWorld) -> Iterator[Engine]:
    yield from _engine("podman", world)


@pytest.fixture
def podman(podman_engine: Engine, world: VolumeWorld) -> Iterator[Engine]:
    yield podman_engine
    podman_engine.clean()
    assert world.checkouts() == {}


@pytest.fixture(scope="module")
def docker_engine(world: VolumeWorld) -> Iterator[Engine]:
    yield from _engine("docker", world)


@pytest.fixture
def docker(docker_engine: Engine, world: VolumeWorld) -> Iterator[Engine]:
    yield docker_engine
    docker_engine.clean()
    assert world.checkouts() == {}


def test_an_agent_works_in_a_podman_volume_until_it_is_removed(
    podman: Engine, world: VolumeWorld
) -> None:
    podman.make_volume("task", instance="o__r-0", owner=str(AGENT))
    assert podman("volume", "ls", "--format", "{{.Driver}} {{.Name}}") == "mirrord task"
    (found,) = podman.json("volume", "inspect", "task")
    assert (found["Status"]["instance"], found["Timeout"]) == ("o__r-0", 60)
    container = podman.start("task:/testbed", "--workdir", "/testbed", user=AGENT)
    assert podman.shell(container, "id -u; cat README") == f"{AGENT}\nnumber 0"
    podman.shell(container, "echo work > new; mkdir d; echo more > d/f")
    assert podman.shell(container, "git status --short") == "?? d/\n?? new"
    as_root = podman("exec", "--user", "0", container, "sh", "-c", _GIT_OF_ROOT)
    assert as_root.startswith("fatal: detected dubious ownership")
    assert as_root.endswith("\n?? d/\n?? new")
    with world.client as client:
        patch = client.diff_checkout(world.checkouts()["task"].id)
    assert b"+work" in patch
    assert "in use" in podman.try_run("volume", "rm", "task").stderr.replace("being used", "in use")
    podman.remove(container)
    podman("volume", "rm", "task")
    assert podman("volume", "ls", "--quiet") == ""
    assert world.checkouts() == {}


def test_two_containers_share_a_volume(podman: Engine, world: VolumeWorld) -> None:
    podman.make_volume("task", instance="o__r-0")
    first, second = (podman.start("task:/testbed") for _ in range(2))
    podman.shell(first, "echo work > /testbed/new")
    assert podman.shell(second, "cat /testbed/new") == "work"
    podman.remove(first)
    assert podman.shell(second, "cat /testbed/new") == "work"
    assert world.call("Get", Name="task")["Volume"]["Status"]["mounts"] == 1


@pytest.mark.parametrize(
    ("options", "volume", "tree"),
    [
        ({"backend": "pool"}, "task:/testbed", "/testbed"),
        ({"what": "directory"}, "task:/mnt/task:rslave", "/mnt/task/tree"),
    ],
    ids=["pool", "directory"],
)
def test_a_reset_is_seen_in_a_container_that_runs(
    podman: Engine, world: VolumeWorld, options: dict[str, str], volume: str, tree: str
) -> None:
    podman.make_volume("task", instance="o__r-0", owner=str(AGENT), **options)
    container = podman.start(volume, user=AGENT)
    with world.client as client:
        checkout = client.open_checkout(world.checkouts()["task"].id)
        _follows_a_reset(lambda script: podman.shell(container, script), checkout, tree)
        checkout.reset("o__r-1")
    assert podman.shell(container, f"cat {tree}/README") == "number 1"


def test_a_restarted_container_sees_the_reset_of_an_overlay(
    podman: Engine, world: VolumeWorld
) -> None:
    podman.make_volume("task", instance="o__r-0", backend="overlay")
    container = podman.start("task:/testbed")
    with world.client as client:
        client.reset_checkout(world.checkouts()["task"].id, "o__r-1")
        assert podman.shell(container, "cat /testbed/README") == "number 0"  # the old tree
        podman("restart", "--time", "0", container)
        assert (
            podman.shell(container, "cat /testbed/README; echo work > /testbed/new") == "number 1"
        )
        assert b"+work" in client.diff_checkout(world.checkouts()["task"].id)


def test_a_bound_directory_follows_resets_in_podman(podman: Engine, world: VolumeWorld) -> None:
    with world.client as client, client.checkout("o__r-0", owner=AGENT) as checkout:
        container = podman.start(f"{checkout.directory}:/mnt/task:rslave", user=AGENT)
        _follows_a_reset(lambda script: podman.shell(container, script), checkout)


@pytest.mark.skipif(bool(container_engines.why_no_podman()), reason="podman is not installed")
def test_a_bound_directory_follows_resets_in_a_rootless_podman(world: VolumeWorld) -> None:
    """uid N of its container is the first subordinate uid of its user, plus N - 1."""
    passwd, subids = f"rootless:x:{USER}:{USER}::/tmp:/bin/sh\n", "rootless:300000:65536\n"
    with (
        accounts(passwd=passwd, group=f"rootless:x:{USER}:\n", subuid=subids, subgid=subids),
        container_engines.podman(world.plugin, USER) as engine,
        world.client as client,
        client.checkout("o__r-0", owner=300000 + AGENT - 1) as checkout,
    ):
        container = engine.start(f"{checkout.directory}:/mnt/task:rslave", user=AGENT)
        _follows_a_reset(lambda script: engine.shell(container, script), checkout)
        engine.clean()


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
def test_a_bound_directory_follows_resets_in_bubblewrap(world: VolumeWorld) -> None:
    with world.client as client, client.checkout("o__r-0", owner=AGENT) as checkout:
        agent = ("setpriv", f"--reuid={AGENT}", f"--regid={AGENT}", "--clear-groups")
        system = "--ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 --bind"
        mounts = (*system.split(), str(checkout.directory))
        command = [*agent, "bwrap", *mounts, "/mnt/task", "--die-with-parent", "sh"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, text=True) as shell:  # type: ignore[call-overload]

            def run(script: str) -> str:
                print(f"({script}); echo; echo end", file=shell.stdin, flush=True)
                return "".join(iter(shell.stdout.readline, "end\n")).strip()

            _follows_a_reset(run, checkout)


def _follows_a_reset(
    run: Callable[[str], str], checkout: mirrord.Checkout, tree: str = "/mnt/task/tree"
) -> None:
    """As the agent: it changes the tree, and goes on in the clean one."""
    assert run(f"cd {tree}; echo junk > junk; echo junk >> README; id -u") == str(AGENT)
    checkout.reset()
    assert run(f"cd {tree}; ls; cat README") == "README\ndocs\nsrc\nnumber 0"
    run(f"echo work > {tree}/new")
    assert b"+work" in checkout.diff()


def test_a_checkout_that_is_attached_to_a_container_follows_resets(
    podman: Engine, world: VolumeWorld
) -> None:
    """In a container that was started with a volume of the overlay backend, over that."""
    podman.make_volume("task", instance="o__r-0", backend="overlay", owner=str(AGENT))
    container = podman.start("task:/testbed", user=AGENT)
    pid = int(podman("inspect", "--format", "{{.State.Pid}}", container))
    with world.client as client:
        checkout = client.open_checkout(world.checkouts()["task"].id)
        checkout.attach("/testbed", pid=pid)
        checkout.attach("/root", pid=pid)
        _follows_a_reset(lambda script: podman.shell(container, script), checkout, "/testbed")
        assert podman.shell(container, "cat /root/new") == "work"


def test_a_container_outlives_the_daemon(podman: Engine, world: VolumeWorld) -> None:
    podman.make_volume("task", instance="o__r-0")
    container = podman.start("task:/testbed")
    world.daemon.kill()
    podman.shell(container, "echo work > /testbed/new")
    world.start()
    assert podman("volume", "ls", "--quiet") == "task"
    with world.client as client:
        assert b"+work" in client.diff_checkout(world.checkouts()["task"].id)
    podman.remove(container)
    assert world.call("Get", Name="task")["Volume"]["Status"]["mounts"] == 0


def test_docker_run_takes_and_releases_a_checkout(docker: Engine, world: VolumeWorld) -> None:
    def run(*options: str, source: str = "", command: str) -> str:
        said = ",".join(
            ["type=volume", f"volume-driver={docker.driver}", "dst=/testbed"]
            + ([f"src={source}"] if source else [])
            + [f"volume-opt={option}" for option in options]
        )
        return docker(
            "run",
            "--rm",
            *docker.usual,
            "--mount",
            said,
            container_engines.IMAGE,
            "sh",
            "-c",
            command,
        )

    assert run("instance=o__r-0", command="cat /testbed/README") == "number 0"
    assert world.checkouts() == {}  # `--rm` removes a volume without a name
    run("instance=o__r-0", source="task", command="echo work > /testbed/new")
    assert run("instance=o__r-0", source="task", command="cat /testbed/new") == "work"
    (found,) = docker.json("volume", "inspect", "task")
    assert found["Status"]["instance"] == "o__r-0"
    with world.client as client:
        client.release_checkout(found["Status"]["checkout"])
    assert docker("volume", "ls", "--quiet") == ""
    assert run("instance=o__r-0", source="task", command="ls /testbed") == "README\ndocs\nsrc"


def test_docker_counts_containers_and_sees_resets_in_place(
    docker: Engine, world: VolumeWorld
) -> None:
    docker.make_volume("o__r-0--a", backend="pool")
    first, second = (docker.start("o__r-0--a:/testbed") for _ in range(2))
    status = docker.json("volume", "inspect", "o__r-0--a")[0]["Status"]
    assert status["mounts"] == 2
    docker.shell(first, "echo junk > /testbed/junk")
    with world.client as client:
        client.reset_checkout(status["checkout"])
    assert docker.shell(second, "ls /testbed") == "README\ndocs\nsrc"
    docker.remove(first)
    assert docker.json("volume", "inspect", "o__r-0--a")[0]["Status"]["mounts"] == 1


def test_a_bound_directory_follows_resets_in_docker(docker: Engine, world: VolumeWorld) -> None:
    with world.client as client, client.checkout("o__r-0", owner=AGENT) as checkout:
        container = docker.start(f"{checkout.directory}:/mnt/task:rslave", user=AGENT)
        _follows_a_reset(lambda script: docker.shell(container, script), checkout)


@pytest.mark.parametrize("program", ["podman", "docker"])
def test_the_documented_commands_run(
    request: pytest.FixtureRequest, world: VolumeWorld, program: str
) -> None:
    engine: Engine = request.getfixturevalue(program)
    text = (PROJECT / "docs" / "integrations.md").read_text().replace("\\\n", "")
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith(program)]
    assert len(commands) > 2
    image = f"{' '.join(engine.usual)} {container_engines.IMAGE} true"
    with world.client as client, client.checkout("psf__requests-2317") as checkout:
        environment = {**engine.environment, "directory": str(checkout.directory)}
        for command in commands:
            command = command.replace("IMAGE COMMAND", image).replace("docker", engine.program)
            command = command.replace("driver=mirrord", f"driver={engine.driver}")
            command = command.replace("driver mirrord", f"driver {engine.driver}")
            command = command.replace("environment=auto", "environment=tools")
            done = subprocess.run(
                command, shell=True, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_example_of_a_rollout(podman: Engine, world: VolumeWorld) -> None:
    words = ("o__r-0", container_engines.IMAGE, "echo fixed > README", "grep fixed README")
    here = {
        "PATH": f"{Path(sys.executable).parent}:{podman.environment['PATH']}",
        "ENGINE": "podman",
    }
    done = subprocess.run(
        [PROJECT / "examples" / "container_rollout.sh", *words],
        env={**podman.environment, **here, "MIRRORD_SOCKET": str(world.daemon.socket)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "+fixed\n" in done.stdout
    assert world.checkouts() == {}


@pytest.mark.parametrize("program", ["podman", "docker"])
def test_mini_swe_agent_works_in_a_volume_with_its_own_docker_environment(
    request: pytest.FixtureRequest, world: VolumeWorld, program: str
) -> None:
    """Unchanged: the volume is named in its `run_args`."""
    engine: Engine = request.getfixturevalue(program)
    if not (python := PROJECT / ".venv/harnesses/bin/python").exists():
        pytest.skip("`make harnesses` has not made .venv/harnesses")
    if program == "podman":
        engine.make_volume("task", instance="o__r-0")
        volume = ["-v", "task:/testbed"]
    else:
        options = f"volume-driver={engine.driver},volume-opt=instance=o__r-0"
        volume = ["--mount", f"type=volume,src=task,{options},dst=/testbed"]
    choices = {
        "image": container_engines.IMAGE,
        "cwd": "/testbed",
        "executable": engine.program,
        "run_args": ["--rm", *engine.usual, *volume],
        "interpreter": ["sh", "-c"],
    }
    done = subprocess.run(
        [python, "-c", _MINI_SWE_AGENT, json.dumps(choices)],
        env={**engine.environment, "MSWEA_SILENT_STARTUP": "1", "HOME": str(world.daemon.root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("\nnumber 0\n"), done.stderr
    with world.client as client:
        assert b"+work" in client.diff_checkout(world.checkouts()["task"].id)
