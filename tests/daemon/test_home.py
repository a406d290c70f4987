"""The home of an ordinary user's daemon: a real user, real namespaces, real overlays."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyone
import pytest
from homes import SUB, UID, Home, home
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.slow]

ROW = "owner/name@main"


@pytest.fixture(scope="module")
def at_home() -> Iterator[Home]:
    with home() as made:
        yield made


def is_alive(pid: int) -> bool:
    """A zombie is not: nobody may wait for it in a container."""
    with suppress(FileNotFoundError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def warnings(made: Home) -> list[str]:
    found: list[str] = json.loads(made.cli("status", "--json"))["health"]["reasons"]
    return found


def checkout(made: Home, *options: str) -> dict[str, str]:
    made_one: dict[str, str] = json.loads(made.cli("checkout", ROW, "--json", *options))
    return made_one


def test_the_doctor_looks_where_the_daemon_mounts(at_home: Home) -> None:
    """Outside of namespaces nothing of an ordinary user's can be mounted."""
    done = at_home.run("-m", "mirrord", "doctor", "--json", check=False)
    facts = {check["name"]: check["fact"] for check in json.loads(done.stdout)}
    assert facts["place"].startswith("namespace: ")
    assert facts["overlay"] == "overlay mount works, for this user"
    assert facts["group"].endswith("does not exist: no other user may use mirrord")
    assert facts["exec"].startswith("for this uid")  # other tests may give it subordinate ones
    assert "root" not in facts["exec"]
    assert facts["privileges"] == f"uid {UID}, may mount"


def test_a_first_session_has_overlays_that_only_the_home_shows(at_home: Home) -> None:
    """The plain path is never an empty directory: what is asked for by path is a tree of the pool."""
    plain = checkout(at_home)
    assert plain["backend"] == "pool"
    assert (Path(plain["path"]) / "a.txt").read_text() == "a\n"
    refused = at_home.run("-m", "mirrord", "checkout", ROW, "--backend", "overlay", check=False)
    assert refused.returncode == 7
    assert "mirrord enter" in refused.stderr
    assert "mirrord exec" in refused.stderr
    inside = json.loads(
        at_home.cli(
            "enter", "--", *anyone.python(), "-P", "-m", "mirrord", "checkout", ROW, "--json"
        )
    )
    assert inside["backend"] == "overlay"
    assert at_home.cli("enter", "--", "cat", f"{inside['path']}/a.txt") == "a\n"
    assert at_home.cli("enter", "--", "id", "-u") == f"{UID}\n"


def test_a_command_from_outside_sees_the_overlay_and_its_changes_are_the_checkouts(
    at_home: Home,
) -> None:
    held = checkout(at_home, "--attach")
    assert held["backend"] == "overlay"
    closed = at_home.run("-c", f"import os; os.listdir({held['path']!r})", check=False)
    assert "PermissionError" in closed.stderr, "its path is an empty directory outside of the home"
    script = "cat a.txt; echo c >> a.txt; mkdir new; echo n > new/f; rm d/b.txt"
    assert at_home.cli("exec", held["id"], "--", "sh", "-c", script) == "a\n"
    patch = at_home.cli("diff", held["id"])
    assert "new/f" in patch
    assert "deleted file" in patch
    forked = at_home.run("-m", "mirrord", "fork", held["id"])
    assert "mirrord enter" in forked.stderr
    assert at_home.cli("exec", forked.stdout.strip(), "--", "cat", "new/f") == "n\n"
    at_home.cli("snapshot", "create", held["id"], "one")
    at_home.cli("reset", held["id"])
    assert at_home.cli("diff", held["id"]) == ""
    assert at_home.cli("exec", held["id"], "--", "cat", "a.txt") == "a\n"
    at_home.cli("reset", held["id"], "--to", "one")
    assert at_home.cli("exec", "--keep-access", held["id"], "--", "cat", "new/f") == "n\n"
    assert at_home.cli("diff", held["id"]) == patch
    weaker = ("exec", held["id"], "--isolation", "none", "--", "cat", "a.txt")
    refused = at_home.run("-m", "mirrord", *weaker, check=False)
    assert refused.returncode == 7, "the plain path is an empty directory"
    assert "only namespaces show" in refused.stderr


def test_a_sandbox_of_a_threaded_client_follows_resets(at_home: Home) -> None:
    script = f"""
import threading
from mirrord import Client, Sandbox
threading.Thread(target=threading.Event().wait, daemon=True).start()
with Client() as client, client.checkout("{ROW}", sandbox=True) as held, Sandbox(held) as box:
    print(held.backend, box.exec("echo x > x; cat a.txt").stdout)
    client.reset_checkout(held.id)
    print(box.exec("ls").stdout)
    print(box.exec("echo y > y; ls").stdout, b"b/y" in held.diff())
"""
    assert at_home.run("-c", script).stdout.splitlines() == [
        "overlay b'a\\n'",
        "b'a.txt\\nd\\n'",
        "b'a.txt\\nd\\ny\\n' True",
    ]


def test_an_attached_tree_in_a_sibling_namespace_follows_resets(at_home: Home) -> None:
    held = checkout(at_home, "--attach")
    place = at_home.root / "place"
    place.mkdir(exist_ok=True)
    os.chown(place, UID, UID)
    mirrord = " ".join([*anyone.python(), "-P", "-m", "mirrord"])
    script = f"{mirrord} attach {held['id']} {place} >&2; cd {place}; touch new; cat a.txt; {mirrord} reset {held['id']} >&2; ls {place}"
    command = [
        "unshare",
        "--user",
        "--map-current-user",
        "--keep-caps",
        "--mount",
        "sh",
        "-c",
        script,
    ]
    done = at_home.run("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *command)
    assert done.stdout.splitlines() == ["a", "a.txt", "d"]


def test_other_users_are_strangers_in_a_home(at_home: Home) -> None:
    """The kernel shows them all as the same number, so none of them is known: not even root."""
    held = checkout(at_home)
    for uid in (0, 65534, UID + 1):
        done = at_home.run("-m", "mirrord", "release", held["id"], user=uid, check=False)
        assert done.returncode == 3, (uid, done.stderr)
    at_home.cli("release", held["id"])


def test_subordinate_users_get_trees_of_the_pool_and_sandboxes() -> None:
    """By newuidmap; what the daemon starts has no capabilities all the same."""
    with home(subordinate=True) as made:
        agent = str(SUB + 5)
        held = checkout(made, "--owner", agent)
        assert held["backend"] == "pool"
        assert os.stat(f"{held['path']}/a.txt").st_uid == SUB + 5
        script = "id -u; echo n > n; chmod 600 n; mkdir -m 700 e; echo e > e/f"
        assert made.cli("exec", held["id"], "--", "sh", "-c", script) == f"{agent}\n"
        assert "b/e/f" in made.cli("diff", held["id"])
        made.cli("reset", held["id"])
        assert made.cli("diff", held["id"]) == ""
        made.cli("release", held["id"])
        refused = made.run("-m", "mirrord", "checkout", ROW, "--owner", "12", check=False)
        assert (refused.returncode, "uidmap" in refused.stderr) == (3, True), refused.stderr
        mapped = ("checkout", ROW, "--owner", agent, "--attach")
        refused = made.run("-m", "mirrord", *mapped, check=False)
        assert "only root's daemon" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_mounts_and_sandboxes_survive_the_daemon(number: signal.Signals) -> None:
    with home() as made:
        held = checkout(made, "--attach")
        made.cli("exec", held["id"], "--", "sh", "-c", "echo mine > mine")
        holder = made.holder()
        made.stop(number)
        assert made.holder() == holder
        assert "serve --detach" in made.run("-m", "mirrord", "status", check=False).stderr
        made.start()
        assert "checkout.remounted" not in made.log
        assert made.cli("exec", held["id"], "--", "cat", "mine") == "mine\n"
        made.cli("release", held["id"])
        made.stop()
        until(lambda: not is_alive(holder))


def test_a_dead_holder_is_replaced_or_costs_a_mount_and_no_change() -> None:
    with home() as made:
        held = checkout(made, "--attach")
        made.cli("exec", held["id"], "--", "sh", "-c", "echo mine > mine")
        os.kill(before := made.holder(), signal.SIGKILL)
        until(lambda: "holder.replaced" in made.log)
        assert made.holder() != before
        assert warnings(made) == []
        assert made.cli("enter", "--", "cat", f"{held['path']}/mine") == "mine\n"
        os.kill(made.pid, signal.SIGSTOP)  # it cannot replace it
        os.kill(before := made.holder(), signal.SIGKILL)
        made.stop(signal.SIGKILL)
        made.start()
        assert made.holder() != before
        assert "checkout.remounted" in made.log
        assert made.cli("exec", held["id"], "--", "cat", "mine") == "mine\n"
        assert made.cli("enter", "--", "cat", f"{held['path']}/mine") == "mine\n"


def test_where_no_holder_can_be_had_status_says_so() -> None:
    with home() as made:
        before = made.holder()
        (made.state_dir / "holder.sock").rename(made.state_dir / "aside")
        (made.state_dir / "holder.sock").mkdir()
        os.kill(before, signal.SIGKILL)
        until(lambda: warnings(made))
        assert any("until it is restarted" in warning for warning in warnings(made))
        assert json.loads(made.cli("status", "--json"))["health"]["status"] == "degraded"


def test_the_holder_ends_with_its_state_directory() -> None:
    with home() as made:
        holder = made.holder()
        made.stop(signal.SIGKILL)
        shutil.rmtree(made.state_dir)
        until(lambda: not is_alive(holder))


def test_two_daemons_of_a_user_have_two_homes_and_a_second_on_one_state_is_refused(
    at_home: Home,
) -> None:
    with home() as other:
        assert other.holder() != at_home.holder()
    second = at_home.run(
        "-m",
        "mirrord",
        "serve",
        "--config",
        str(at_home.config),
        "--socket",
        f"{at_home.root}/other",
        check=False,
    )
    assert second.returncode == 5
    assert at_home.json("GET", "/v1/health")["status"] == "ok"


def test_never_means_never() -> None:
    with home('[service]\nnamespace = "never"\n') as made:
        assert not (made.state_dir / "holder.sock").exists()
        assert os.stat(f"/proc/{made.pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
        assert checkout(made)["backend"] == "pool"
        done = made.run("-m", "mirrord", "enter", check=False)
        assert done.returncode == 4
        assert "it has none" in done.stderr
        assert warnings(made) == []


def test_a_configured_group_is_known_outside_of_a_home() -> None:
    with home('[access]\ngroup = "users"\n') as made:
        assert checkout(made)["backend"] == "pool"
        assert any("access.group" in each for each in warnings(made))


def test_where_the_kernel_refuses_the_pool_serves_and_status_says_why() -> None:
    """In a sandbox without user namespaces, as a container may be."""
    with home(namespaces=False) as made:
        assert checkout(made)["backend"] == "pool"
        assert any("max_user_namespaces allows" in warning for warning in warnings(made))
        refused = made.run("-m", "mirrord", "checkout", ROW, "--backend", "overlay", check=False)
        assert "this host does not allow it" in refused.stderr
        assert made.cli("exec", ROW, "--keep-access", "--", "cat", "a.txt") == "a\n"
