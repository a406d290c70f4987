"""An ordinary user's daemon with the HOME of another, as `sudo -u` and `setpriv` leave it."""

from __future__ import annotations

import pytest
from daemons import daemon
from gitrepos import Upstream

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_a_home_that_cannot_be_read_damages_no_mirror() -> None:
    with daemon(start=False, user=1500) as running:
        upstream = Upstream(running.root / "r")
        commit = upstream.history(2)[0]
        home = running.root / "home"
        home.mkdir(mode=0o700)
        running.write_config(
            f'[[mirror]]\nrepo = "o/r"\nurl = "file://{upstream.path}"\n[access]\nadmins = ["root"]\n'
        )
        running.start(prefix=("env", f"HOME={home}"))
        status, _, body = running.request(
            "POST", "/v1/checkouts", {"mirror": "o/r", "commit": commit, "owner": 1500}
        )
        assert status == 201, body
