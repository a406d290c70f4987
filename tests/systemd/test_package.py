"""The Debian package on a Debian under systemd: installed, used by a member, purged.

One machine is booted for the whole file; the tests run in order, each from where the last one left it. The commands are
those of docs/installation.md. Upgrades, all documented commands and wheels are in tests/packaging/test_package.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_host import BLOCKS, ENV, REASON, STATE, Host, booted, build

import mirrord

pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(600),
    pytest.mark.root,
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    scratch = Path(tempfile.mkdtemp(prefix="mirrord-package-"))
    scratch.chmod(0o755)
    (package,) = build(scratch / "packages", "--only", "mirrord")
    with booted(scratch, package.name) as host:
        yield host
    shutil.rmtree(scratch)


def test_from_nothing_to_a_checkout_takes_four_commands(host: Host) -> None:
    commands = host.documented(BLOCKS[0])
    assert len(commands) <= 4
    for command in commands:
        printed = host.shell(command)
    assert printed.startswith(f"{STATE}/checkouts/")
    assert host.shell(f"cat {printed}/README") == "first"
    assert host.shell("mirrord --version") == f"mirrord {mirrord.__version__}"
    assert (
        host.shell("stat -c '%a %U' /etc/mirrord /etc/mirrord/config.toml") == "750 root\n640 root"
    )


def test_a_member_gets_overlays_pages_and_completion(host: Host) -> None:
    """By the units of the package, which start its own environment."""
    host.shell("usermod -aG mirrord alice; mirrord dataset import /srv/upstreams/rows.jsonl")
    made = host.json("checkout", "psf__requests-9", user="alice")
    assert (made["backend"], made["owner_uid"]) == ("overlay", 12345)
    host.shell(f"echo mine >>{made['path']}/README", "alice")
    assert "+mine" in host.shell(f"mirrord diff {made['id']}", "alice")
    pages = host.shell("ls /usr/share/man/man1 | grep ^mirrord").split()
    assert {"mirrord.1.gz", "mirrord-mirror-add.1.gz", "mirrord-checkout.1.gz"} <= set(pages)
    host.shell("test -e /usr/share/doc/mirrord/docs/observability/alerts.yml")
    host.shell("test -e /usr/lib/systemd/user/mirrord.service")
    script = "source /usr/share/bash-completion/completions/mirrord; complete -p mirrord"
    assert "_mirrord_completion" in host.shell(f"bash -c '{script}'")
    words = {
        **ENV,
        "_MIRRORD_COMPLETE": "bash_complete",
        "COMP_WORDS": "mirrord ch",
        "COMP_CWORD": "1",
    }
    assert "plain,checkout" in host.machine.run("mirrord", env=words).stdout
    checks = {
        each["name"]: each for each in json.loads(host.shell("mirrord doctor --json || true"))
    }
    assert checks["systemd"]["verdict"] == "ok", checks["systemd"]


def test_a_purge_stops_everything_and_keeps_the_state(host: Host) -> None:
    told = host.shell("apt-get purge --yes mirrord")
    assert f"kept the mirrors, pins and checkouts in {STATE}" in told
    assert host.mounts() == []
    assert host.shell("systemctl list-units --plain --no-legend 'mirrord*' --state=active") == ""
    left = "/usr/lib/mirrord /etc/mirrord /run/mirrord /etc/systemd/system/*/mirrord*"
    assert host.shell(f"ls -d {left} 2>/dev/null || true") == ""
    assert host.shell(f"ls {STATE}/mirrors") == "psf__requests"
