"""`python -m redteam --socket PATH`: every attack, one line each; exit status 1 if one succeeded."""

from __future__ import annotations

import argparse
import grp
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from . import outside, owners, strangers  # noqa: F401 - each registers its attacks
from .scene import ATTACKS, MEMBER, OWNER, SECRET, STRANGER, VICTIM, Scene

__all__ = ["ATTACKS", "main"]

_NAMES = {STRANGER: "stranger", MEMBER: "member", OWNER: "owner", 0: "root"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="redteam", description=__doc__)
    parser.add_argument("--socket", type=Path, default=Path("/run/mirrord/mirrord.sock"))
    parser.add_argument("--config", type=Path, default=Path("/etc/mirrord/config.toml"))
    parser.add_argument("--group", default="mirrord", help="whose members may use the daemon")
    parser.add_argument("--mirrord", default=shutil.which("mirrord") or "/opt/mirrord/bin/mirrord")
    parser.add_argument("attacks", nargs="*", help="by name; all without one")
    words = parser.parse_args()
    if os.geteuid():
        parser.error("must be run as root, which becomes the users that attack")
    scene = _scene(words)
    broken = 0
    try:
        for attack in ATTACKS:
            if words.attacks and attack.name not in words.attacks:
                continue
            _restore(scene, attack.name)
            held, what = scene.run_as(attack.uid, attack.work)
            scene.must_live()
            if any(scene.trap.iterdir()):
                held, what = False, f"files in the trap: {os.listdir(scene.trap)}"
            broken += not held
            who = _NAMES[attack.uid]
            print(f"{'held' if held else 'BROKEN':7} {who:17} {attack.name:40} {what}", flush=True)
    finally:
        for made in (scene.victim, scene.own):
            scene.ask("DELETE", f"/v1/checkouts/{made['id']}")
        shutil.rmtree(scene.trap)
    return 1 if broken else 0


def _scene(words: argparse.Namespace) -> Scene:
    scene = Scene(words.socket, grp.getgrnam(words.group).gr_gid, words.mirrord, "", "")
    mirrors = json.loads(scene.ask("GET", "/v1/mirrors")[1])
    ready = next((each for each in mirrors if each["state"] == "ready"), None)
    assert ready, "the daemon has no mirror that is ready"
    scene.mirror, scene.commit = ready["name"], ready["default_branch"] or "HEAD"
    scene.victim = scene.check_out(VICTIM)
    scene.commit = scene.victim["commit"]
    secret = Path(scene.victim["path"], "secret")
    secret.write_text(SECRET)
    secret.chmod(0o644)
    scene.own = scene.check_out(OWNER, commit=f"{scene.commit}~1")
    scene.later = scene.commit
    scene.state = Path(scene.own["directory"]).parents[1]
    scene.config = words.config if words.config.exists() else Path()
    scene.trap = Path(tempfile.mkdtemp(prefix="redteam-trap-"))
    scene.settings = json.loads(scene.ask("GET", "/v1/config")[1])["settings"]
    document = json.loads(scene.ask("GET", "/v1/openapi.json")[1])
    scene.routes = [
        (method.upper(), re.sub(r"\{(\w+)[^}]*\}", r"{\1}", path))
        for path, methods in document["paths"].items()
        for method in methods
        if method in {"get", "post", "delete"}
    ]
    return scene


def _restore(scene: Scene, name: str) -> None:
    """The attacker's checkout as it was, and what the attack expects in it."""
    status, answer = scene.ask("POST", f"/v1/checkouts/{scene.own['id']}/reset", {})
    assert status == 200, answer
    if name == "a-file-of-root-is-in-the-diff":
        hidden = scene.tree / "hidden"
        hidden.write_text("SECRET")
        hidden.chmod(0o600)


if __name__ == "__main__":
    sys.exit(main())
