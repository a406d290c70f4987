"""Who could set a ctime: in a container without certain capabilities, nobody; with MKNOD, `places/test_container.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mirrord.host.ctimes import may_forge_ctimes

pytestmark = pytest.mark.root

_ASK = "from mirrord.host.ctimes import may_forge_ctimes; print(may_forge_ctimes())"
_ALL = ("sys_time", "sys_rawio", "sys_admin", "sys_module", "mknod")


def asked_in_a_container(*dropped: str, beside: str = "") -> bool:
    """Ask as root of a pid namespace, whose processes lack capabilities but for one `beside`."""
    bounding = ",".join(f"-{each}" for each in dropped)
    ask = f'setpriv --bounding-set={bounding} -- "$0" -c "$1"'
    inside = ["setpriv", f"--bounding-set={bounding}", "--"] if not beside else []
    script = f"{beside} {ask}" if beside else ask
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *inside, "sh", "-c", script, sys.executable, _ASK],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip() == "True"


def test_root_of_the_host_can() -> None:
    assert may_forge_ctimes()


@pytest.mark.parametrize("kept", [None, *_ALL])
def test_root_of_a_container_cannot_without_the_capabilities(kept: str | None) -> None:
    dropped = [each for each in _ALL if each != kept]
    assert asked_in_a_container(*dropped) == (kept is not None)


def test_one_process_that_has_them_is_enough() -> None:
    """Such as one that was started with more of them in the same container."""
    assert asked_in_a_container(*_ALL, beside="sleep 60 & ")
