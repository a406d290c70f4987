"""Labels, by which a scheduler finds the checkouts of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from daemons import Daemon, daemon
from gitrepos import Upstream

from mirrord import Client
from mirrord.cli.main import run
from mirrord.errors import InvalidRequestError


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("labels")
    Upstream(root / "owner+name").history(2)
    with daemon(f'[upstream]\nurl = "file://{root}/{{owner}}+{{name}}"\n') as made:
        with Client(made.socket) as client:
            client.wait(client.add_mirror("owner/name"))
        yield made


def mirrord(running: Daemon, *args: str) -> int:
    return run(["--socket", str(running.socket), *args])


def labels(client: Client, label: str | None = None) -> list[str | None]:
    return [each.label for each in client.list_checkouts(label)]


def test_a_label_goes_to_forks_and_grades_and_over_a_restart(
    running: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(running.socket) as client:
        one = client.checkout("owner/name@main", label="slurm/job=7", auto_renew=False)
        client.checkout("owner/name@main", label="slurm/job=77", auto_renew=False)
        client.checkout("owner/name@main", auto_renew=False)
        fork = client.fork_checkout(one.id, auto_renew=False)
        client.grade_checkout(one.id, auto_renew=False)
        one.reset()
        assert labels(client, "slurm/job=7") == ["slurm/job=7"] * 3
        assert labels(client, "slurm/job=77") == ["slurm/job=77"]
        assert labels(client, "slurm/job") == []
        assert len(labels(client)) == 5
        assert client.get_checkout(fork.id).label == "slurm/job=7"
    running.stop()
    running.start()
    with Client(running.socket) as client:
        assert labels(client, "slurm/job=7") == ["slurm/job=7"] * 3
    assert mirrord(running, "checkouts", "--label", "slurm/job=77", "--json") == 0
    assert [each["label"] for each in json.loads(capsys.readouterr().out)] == ["slurm/job=77"]
    assert mirrord(running, "release", "--label", "slurm/job=7") == 0
    assert mirrord(running, "release", "--label", "slurm/job=7") == 0  # none is left
    with Client(running.socket) as client:
        assert sorted(labels(client), key=str) == [None, "slurm/job=77"]
    assert mirrord(running, "release") == 2
    assert mirrord(running, "release", "--label", "a", "b") == 2


def test_the_environment_has_the_label_that_is_not_named(
    running: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIRRORD_LABEL", "slurm/8")
    with Client(running.socket) as client:
        with client.checkout("owner/name@main") as one, client.grade("owner/name@main", b"") as two:
            assert (one.lease.label, two.lease.label) == ("slurm/8", "slurm/8")
        with client.checkout("owner/name@main", label="mine") as named:
            assert named.lease.label == "mine"
        with client.grade("owner/name@main", b"", label="mine") as grade:
            assert grade.lease.label == "mine"
        monkeypatch.setenv("MIRRORD_LABEL", "")
        with client.checkout("owner/name@main") as plain:
            assert plain.lease.label is None
    monkeypatch.setenv("MIRRORD_LABEL", "slurm/9")
    assert mirrord(running, "checkout", "owner/name@main") == 0
    assert capsys.readouterr().out
    assert mirrord(running, "release", "--label", "slurm/9") == 0
    with Client(running.socket) as client:
        assert labels(client, "slurm/9") == []


@pytest.mark.parametrize("label", ["", "-a", "a b", "a\n", "é", "a" * 201])
def test_a_label_is_a_plain_word(running: Daemon, label: str) -> None:
    with Client(running.socket) as client:
        with pytest.raises(InvalidRequestError):
            client.checkout("owner/name@main", label=label, auto_renew=False)
        with pytest.raises(InvalidRequestError):
            client.list_checkouts(label or " ")
