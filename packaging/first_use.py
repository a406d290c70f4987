"""Type the README's session as a newcomer and write what is printed into docs/installation.md.

In a container with nothing but this machine's /usr, the wheels and a user's empty home: `make
first-use`. The wheels are those of this tree and of requirements.lock; no index is asked. With
`--upstream URL` repositories come from there, `{owner}` and `{name}` in it, else from GitHub.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from deb import WHEELS, fetch_wheels
from release import CLIENT, PROJECT, run
from sessions import Shell, blocks, session

DOCUMENT = PROJECT / "docs/installation.md"
HEADING = "\n## A first use\n"
INSTALL = (
    "python3 -m venv mirrord",
    "mirrord/bin/pip install --quiet --no-index --find-links /wheels mirrord && du -sh mirrord",
    'export PATH="$PWD/mirrord/bin:$PATH"',
    "mirrord doctor | head -1",
)
UID = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--upstream", default="https://github.com/{owner}/{name}.git")
    chosen = parser.parse_args()
    fetch_wheels()
    with tempfile.TemporaryDirectory(prefix="mirrord-first-") as scratch:
        place = Path(scratch)
        place.chmod(0o755)
        prepare(place, chosen.upstream)
        shell = Shell(contained(place, chosen.upstream))
        try:
            lines = list(typed(shell))
        finally:
            shell.close()
    before = DOCUMENT.read_text().partition(HEADING)[0]
    DOCUMENT.write_text(before.rstrip("\n") + "\n" + "\n".join([HEADING, *lines, "```", ""]))


def prepare(place: Path, upstream: str) -> None:
    """The wheels, and a home with a configuration where GitHub is not asked."""
    shutil.copytree(WHEELS, place / "wheels")
    for project in (PROJECT / CLIENT, PROJECT):
        hatch = (sys.executable, "-m", "hatchling", "build", "-t", "wheel")
        run(*hatch, "-d", str(place / "wheels"), cwd=project)
    (place / "home").mkdir()
    (place / "config.toml").write_text(f'[upstream]\nurl = "{upstream}"\n')
    os.chown(place / "home", UID, UID)


def contained(place: Path, upstream: str) -> list[str]:
    """The start of a shell in the container, as an ordinary user."""
    shown = ["--ro-bind", str(place / "wheels"), "/wheels"]
    shown += ["--ro-bind", str(place / "config.toml"), "/config.toml"]
    if upstream.startswith("file://"):
        directory = upstream.removeprefix("file://").partition("{")[0]
        for each in {directory, *(str(path.resolve()) for path in Path(directory).rglob("*/*"))}:
            shown += ["--ro-bind", each, each]
    files = ("passwd", "group", "ssl", "alternatives", "ld.so.cache")
    shown += [word for name in files for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    links = ("bin", "sbin", "lib", "lib64")
    shown += [word for name in links for word in ("--symlink", f"usr/{name}", f"/{name}")]
    become = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    if os.geteuid() != 0:
        become = []
    variables = {"HOME": "/home/you", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    if not upstream.startswith("https://github.com/"):
        variables["MIRRORD_CONFIG"] = "/config.toml"
    box = ["bwrap", "--unshare-all", "--share-net", "--die-with-parent", "--clearenv"]
    box += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    box += ["--bind", str(place / "home"), "/home/you", "--chdir", "/home/you", *shown]
    box += [word for pair in variables.items() for word in ("--setenv", *pair)]
    return [*become, *box, "bash"]


def typed(shell: Shell) -> list[str]:
    """The commands with what they print."""
    commands = [*INSTALL]
    for block in blocks("README.md", "console"):
        commands += [command for command, _ in session(block) if not command.startswith("make ")]
    commands.append("mirrord exec psf__requests-v2.3.0 -- python3 -V")
    place = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    load = f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} processors"
    lines = [
        f"The README's session, typed by `make first-use` on {time.strftime('%Y-%m-%d')} as an",
        f"ordinary user in a container that shows nothing but `/usr` ({place}),",
        f"with the time that each command took beside a load of {load}.",
        "",
        "```console",
    ]
    documented, tree = "", ""
    for command in commands:
        if tree:
            command = command.replace(documented, tree)
        began = time.monotonic()
        printed = shell.run(command)
        seconds = time.monotonic() - began
        if command.startswith("mirrord checkout "):
            tree = printed.strip()
            documented = "/var/lib/mirrord/checkouts/x3vtrlbeai6obdz2/tree"
        lines.append(f"$ {command}" + (f"    # {seconds:.1f} s" if seconds >= 0.05 else ""))
        lines += printed.rstrip("\n").splitlines()
    return lines


if __name__ == "__main__":
    main()
