"""`mirrord receipt` against a real daemon and the real ssh-keygen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemons import daemon
from gitrepos import Upstream

from mirrord import Client
from mirrord.cli.main import run


class World(NamedTuple):
    socket: Path
    checkout: str
    receipt: bytes
    key: Path
    signers: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("receipts")
    upstream = Upstream(root / "up" / "demo+project")
    upstream.history(2)
    text = (
        f'[upstream]\nurl = "file://{root}/up/{{owner}}+{{name}}"\n[checkouts]\nprewarm = false\n'
    )
    key = root / "key"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key), "-C", "lab"]
    subprocess.run(make, check=True)
    signers = root / "signers"
    signers.write_text(f"lab@example.com {(root / 'key.pub').read_text()}")
    with daemon(text) as running, Client(running.socket) as client:
        client.wait(client.add_mirror("demo/project"))
        checkout = client.checkout("demo__project@main")
        receipt = checkout.receipt().canonical()
        yield World(running.socket, checkout.id, receipt, key, signers)


@pytest.fixture
def mirrord(world: World, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: object) -> tuple[int, str, str]:
        status = run(["receipt", "--socket", str(world.socket), *map(str, words)])
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


def test_a_receipt_is_canonical_json(world: World, mirrord: Callable[..., Any]) -> None:
    """One line: names sorted, no blanks, nothing that is null; the API sends the same form."""
    status, out, _ = mirrord(world.checkout)
    value = json.loads(out)
    assert status == 0
    assert out == json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"
    assert None not in value.values()
    assert value["format"] == "mirrord-receipt/1"
    assert value.keys() == json.loads(world.receipt).keys()


def test_a_receipt_is_verified_from_a_file(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    """However it is laid out; unsigned, it is proven by the daemon's record of it."""
    file = tmp_path / "receipt.json"
    for text in (world.receipt.decode(), json.dumps(json.loads(world.receipt), indent=2)):
        file.write_text(text)
        status, out, _ = mirrord("--verify", file)
        assert status == 0
        checked = "format, mirror, commit, tree, head, closure.objects, closure.sha256"
        note = "unsigned; the daemon has issued exactly this receipt"
        assert out == f"the receipt holds: checked {checked}\n{note}\n"


@pytest.mark.parametrize("change", [{"history": "linked"}, {"resets": 0, "checkout": "x" * 16}])
def test_an_unsigned_receipt_that_was_edited_is_not_proven(
    world: World, mirrord: Callable[..., Any], tmp_path: Path, change: dict[str, object]
) -> None:
    """Where the mirror has all that it states, for people and for programs."""
    value = json.loads(world.receipt) | change
    if "history" in change:
        for member in ("closure", "seal", "template"):
            value.pop(member, None)
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(value))
    status, out, _ = mirrord("--verify", file)
    assert status == 8
    assert out.startswith("the receipt is not proven: checked format, mirror, commit, tree, head")
    assert "\nunsigned, and the daemon has no record of it: " in out
    status, out, _ = mirrord("--verify", file, "--json")
    report = json.loads(out)
    assert (status, report["holds"], report["proven_by"]) == (8, True, [])


def test_a_receipt_of_a_grade_is_recorded_whole(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    """Its grade is not sent to be compared, and an edit of it is noticed."""
    with Client(world.socket) as client, client.grade("demo__project@main", b"") as grade:
        value = json.loads(grade.receipt().canonical())
    file = tmp_path / "receipt.json"
    for policy, expected in ((value["grade"]["policy"], 0), ("drop", 8)):
        file.write_text(json.dumps(value | {"grade": value["grade"] | {"policy": policy}}))
        assert mirrord("--verify", file)[0] == expected


@pytest.mark.parametrize(
    ("change", "member"),
    [
        (lambda value: value.update(tree="e" * 40), "tree"),
        (lambda value: value["closure"].update(objects=7), "closure.objects"),
        (lambda value: value.update(mirror="no__mirror"), "mirror"),
        (lambda value: value.update(score="100%"), "format"),
        (lambda value: value["closure"].update(more=1), "format"),
        (lambda value: value.update(resets=1.5), "format"),
        (lambda value: value.update(format="mirrord-receipt/9"), "format"),
        (lambda value: value.pop("commit"), "format"),
        (lambda value: value.update(created_at="yesterday"), "format"),
    ],
)
def test_a_forged_receipt_ends_with_8_and_names_the_member(
    world: World,
    mirrord: Callable[..., Any],
    tmp_path: Path,
    change: Callable[[Any], object],
    member: str,
) -> None:
    """For people on a line, for programs as JSON."""
    value = json.loads(world.receipt)
    change(value)
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(value))
    status, out, _ = mirrord("--verify", file)
    assert status == 8
    assert out.startswith(f"{member}: ")
    status, out, _ = mirrord("--verify", file, "--json")
    assert status == 8
    report = json.loads(out)
    assert (report["holds"], report["mismatches"][0]["member"]) == (False, member)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":1,"format":2}', "[" * 100_000, "\xff"])
def test_a_file_that_is_no_receipt_ends_with_8(
    mirrord: Callable[..., Any], tmp_path: Path, text: str
) -> None:
    """Before anybody is asked."""
    file = tmp_path / "receipt.json"
    file.write_bytes(text.encode("latin-1"))
    status, out, err = mirrord("--verify", file)
    assert (status, err) == (8, "")
    assert out.startswith("format: ")


def test_a_signed_receipt_names_its_signer(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    """Without a list of signers it says that nobody vouches for the key."""
    status, out, _ = mirrord(world.checkout, "--sign", world.key)
    assert status == 0
    file = tmp_path / "receipt.json"
    file.write_text(out)
    status, out, _ = mirrord("--verify", file)
    assert status == 0
    assert "the signer was not checked" in out
    who = ("--allowed-signers", world.signers, "--identity", "lab@example.com")
    status, out, _ = mirrord("--verify", file, *who)
    assert status == 0
    assert 'Good "mirrord-receipt" signature for lab@example.com' in out
    status, out, _ = mirrord("--verify", file, *who[:3], "else@example.com")
    assert status == 8
    assert out.startswith("signature: ")


def test_any_change_of_a_signed_receipt_breaks_its_signature(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    """Also of a member that no mirror can check."""
    value = json.loads(mirrord(world.checkout, "--sign", world.key)[1])
    file = tmp_path / "receipt.json"
    for member, changed in (("resets", 5), ("signature", "junk"), ("instance", "x")):
        file.write_text(json.dumps({**value, member: changed}))
        status, out, _ = mirrord("--verify", file)
        assert status == 8
        assert out.startswith("signature: ")


def test_the_commands_of_the_document_run(world: World, tmp_path: Path) -> None:
    """A stranger recomputes digests and checks the signature with git, jq and ssh-keygen alone."""
    document = (Path(__file__).parents[2] / "docs/seals.md").read_text()
    facts = json.loads(world.receipt)
    subprocess.run(["git", "clone", "-q", facts["upstream"], "clone"], cwd=tmp_path, check=True)
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", document, re.DOTALL | re.MULTILINE))
    for word, real in (
        ("receipt ID", f"receipt {world.checkout}"),
        ("~/.ssh/id_ed25519", str(world.key)),
        ("signers", str(world.signers)),
        ("allowed-" + str(world.signers), "allowed-signers"),
        ("COMMIT", facts["commit"]),
    ):
        text = text.replace(word, real)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MIRRORD_SOCKET": str(world.socket),
    }
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True, check=True
    )
    for fact in (facts["closure"]["sha256"], facts["closure"]["objects"], facts["tree"]):
        assert str(fact) in done.stdout
    assert done.stdout.count("the receipt holds") == 2
    assert done.stdout.count('Good "mirrord-receipt" signature for lab@example.com') == 2


def test_an_unsigned_receipt_is_refused_where_a_signer_is_asked_for(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "receipt.json"
    file.write_bytes(world.receipt)
    who = ("--allowed-signers", world.signers, "--identity", "lab@example.com")
    status, out, _ = mirrord("--verify", file, *who)
    assert status == 8
    assert out.startswith("signature: unsigned\n")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["x", "--verify", "y"],
        ["--verify", "y", "--sign", "k"],
        ["--verify", "/nonexistent"],
        ["x", "--identity", "me"],
        ["--verify", "-", "--allowed-signers", "/nonexistent"],
        ["--verify", "-", "--allowed-signers", "/nonexistent", "--identity", "me"],
    ],
)
def test_wrong_usage_ends_with_2(mirrord: Callable[..., Any], words: list[str]) -> None:
    status, out, err = mirrord(*words)
    assert (status, out) == (2, "")
    assert "hint: " in err


def test_a_key_that_cannot_sign_ends_with_2(
    world: World, mirrord: Callable[..., Any], tmp_path: Path
) -> None:
    """No receipt is printed."""
    bad = tmp_path / "key"
    for content in (None, "not a key\n"):
        if content:
            bad.write_text(content)
            bad.chmod(0o600)
        status, out, err = mirrord(world.checkout, "--sign", bad)
        assert (status, out) == (2, "")
        assert "mirrord: cannot sign with" in err


def test_without_ssh_keygen_a_resource_is_missing(
    world: World, mirrord: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    status, out, err = mirrord(world.checkout, "--sign", world.key)
    assert (status, out) == (7, "")
    assert "install openssh-client" in err
