"""Preparing a dataset makes its first checkouts warm."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from anyone import ask_as
from daemons import Daemon, daemon
from gitrepos import Upstream
from waiting import until

from mirrord import Client
from mirrord.cli.main import run
from mirrord.errors import InstanceNotFoundError, NotFoundError

GROUP, MEMBER, OTHER, STRANGER = 34571, 34572, 34573, 34574


@pytest.fixture
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Nothing is prepared after an import; the last of three instances cannot be served."""
    root = tmp_path_factory.mktemp("prepare")
    commits = [*Upstream(root / "owner" / "name").history(2), "1" * 40]
    rows = [
        {"instance_id": f"i-{n}", "repo": "owner/name", "base_commit": commit}
        for n, commit in enumerate(commits)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f'[upstream]\nurl = "file://{root}/{{owner}}/{{name}}"\n[access]\ngroup = "{GROUP}"\n'
    with daemon(f"{text}[checkouts]\nprewarm = false\n") as made:
        with Client(made.socket) as client:
            client.wait(client.import_dataset(root / "rows.jsonl", name="d"))
        yield made


def built(running: Daemon) -> int:
    return sum(line["event"] == "template.built" for line in running.log_lines)


@pytest.mark.root  # others may have no overlay, and so no templates
def test_first_checkouts_are_warm(running: Daemon) -> None:
    with Client(running.socket) as client:
        one = client.wait(client.prepare_dataset("d", "i-1"))
        assert (one.kind, one.subject) == ("dataset.prepare", "d")
        assert one.result == {"prepared": 1, "failed": 0, "left": 0}
        assert (one.progress.done, one.progress.total) == (1, 1)
        assert built(running) == 1
        every = client.wait(client.prepare_dataset("d"))
        assert every.result == {"prepared": 2, "failed": 1, "left": 0}
        assert built(running) == 2
        for instance in ("i-0", "i-1"):
            with client.checkout(instance):
                pass
        assert built(running) == 2


def test_what_is_named_must_be_there(running: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(running.socket) as client:
        with pytest.raises(NotFoundError):
            client.prepare_dataset("e")
        with pytest.raises(InstanceNotFoundError):
            client.prepare_dataset("d", "i-0", "i-3")
        assert [each.kind for each in client.list_operations()] == ["dataset.import"]
    words = ["--socket", str(running.socket), "rehearse", "--prewarm", "--dataset", "d"]
    assert run([*words, "i-0"]) == 0
    assert capsys.readouterr().out == "1 commit prepared, 0 failed, 0 left\n"
    assert run(words) == 8
    assert capsys.readouterr().out == "2 commits prepared, 1 failed, 0 left\n"
    assert run([*words, "i-3"]) == 4


@pytest.mark.root
def test_a_member_may_and_sees_what_it_asked_for(running: Daemon) -> None:
    """A member may prepare, and sees only its own operations."""
    request = ("POST", "datasets/d/prepare", {"instances": ["i-0"]})
    ((status, text),) = ask_as(MEMBER, running.socket, request, groups=[GROUP])
    assert status == 202, text
    mine = ("GET", f"operations/{json.loads(text)['id']}", None)

    def shown() -> str:
        ((_, found),) = ask_as(MEMBER, running.socket, mine, groups=[GROUP])
        return found

    until(lambda: json.loads(shown())["state"] == "done")
    assert json.loads(shown())["result"] == {"prepared": 1, "failed": 0, "left": 0}
    assert ask_as(OTHER, running.socket, mine, groups=[GROUP])[0][0] == 404
    assert ask_as(STRANGER, running.socket, request)[0][0] == 403
