"""A support bundle without a daemon, and what is scrubbed from answers and logs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from canaries import Canaries

from mirrord import doctor
from mirrord.cli.main import run
from mirrord.doctor.support import Scrubber

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def secrets() -> Canaries:
    return Canaries()


def test_without_a_daemon_it_says_what_could_not_be_had(
    tmp_path: Path, secrets: Canaries, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And no password or token of the configuration is in it."""
    monkeypatch.setitem(doctor._CHECKS, "its speed", lambda _: ("ok", "not measured", ""))
    word = secrets.plant
    config = tmp_path / "config.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/s"\n'
        f'[upstream]\nurl = "https://me:{word("password")}@forge/{{owner}}/{{name}}"\n'
        f'fallbacks = ["https://forge/{word("path")}/{{name}}?private_token={word("query")}"]\n'
        f'[environments]\nindex = "https://host/{word("index token")}/simple"\n'
        f'[[mirror]]\nrepo = "o/r"\nurl = "https://{word("user")}@forge/x"\n'
    )
    (tmp_path / "state").mkdir()
    line = {"event": "daemon.started", "pid": 7, "instance": word("instance")}
    (tmp_path / "state" / "daemon.log").write_text(json.dumps(line) + "\n")
    monkeypatch.setenv("PATH", "/nowhere")  # without journalctl
    file = tmp_path / "bundle.tar.gz"
    words = ["doctor", "--report", str(file), "--config", str(config), "--json"]
    assert run(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["path"] == str(file)
    assert {"configuration.json", "doctor.json", "places.json", "versions.json"} <= set(
        answer["parts"]
    )
    assert "no such socket" in answer["missing"]["status.json"]
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        parts = {each.name: archive.extractfile(each) for each in archive}
        content = b"".join(part.read() for part in parts.values() if part)
    assert secrets.found_in(content) == set()
    assert b"https://forge/" in content
    assert b'{"message": {"event": "daemon.started", "pid": 7}}' in content
    assert run(words) == 5
    assert run(["doctor", "--report", str(tmp_path / "absent" / "x"), "--config", str(config)]) == 2


def test_a_commit_has_another_name_the_same_one_throughout() -> None:
    one, other = Scrubber(), Scrubber()
    told = one.text(f"cannot serve {_COMMIT[:12]} of o__r, {_COMMIT}, 1234567 bytes")
    assert "0123456" not in told
    assert told.endswith(", 1234567 bytes")
    assert one.text(_COMMIT) == one.text(_COMMIT.upper()) in told
    assert one.text(_COMMIT) != other.text(_COMMIT)


def test_of_an_event_numbers_and_names_stay(secrets: Canaries) -> None:
    fields = {
        "mirror": "o__r", "commit": _COMMIT, "duration_s": 1.5, "operation": "0123456789abcdef",
        "instance": secrets.plant("id"), "detail": secrets.plant("row"),
        "unpinned": [secrets.plant("listed")], "rows": [{"patch": secrets.plant("patch"), "n": 1}],
    }  # fmt: skip
    kept = Scrubber().event("dataset.refused", fields)
    assert kept == {
        "mirror": "o__r", "duration_s": 1.5, "operation": "0123456789abcdef",
        "unpinned_count": 1, "rows": [{"n": 1}],
    }  # fmt: skip
    told = Scrubber().event("mirror.failed", {"mirror": "o__r", "detail": "upstream is down"})
    assert told["detail"] == "upstream is down"


def test_of_a_crash_the_frames_stay(secrets: Canaries) -> None:
    """An exception's message and its source lines may quote anything."""
    try:
        raise ValueError(secrets.plant("message"))
    except ValueError:
        import traceback

        trace = traceback.format_exc()
    line = json.dumps({"event": "request.crashed", "exception": trace, "level": "error"})
    for told in (Scrubber().log_line(line)["exception"], Scrubber().log_line(trace).splitlines()):
        assert told[-1] == "ValueError"
        assert "test_support.py" in told[1]
        assert secrets.found_in(json.dumps(told)) == set()
