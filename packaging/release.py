"""Build a release into dist/: wheels, sdists, the Debian package, an SBOM and their checksums.

Everything is built from the commit at HEAD in a directory of its own, so that nothing of the work
tree gets in; the same commit gives the same bytes (`--check` builds twice and compares). Refuses a
work tree with changes, and a version that the CHANGELOG does not describe. Run it by `make release`
or `make release-check`.
"""

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
ENVIRONMENT = PROJECT / ".venv"
CYCLONEDX = ENVIRONMENT / "release/bin/cyclonedx-py"  # of `make release-tools`
CLIENT = "packaging/client"


class Refused(Exception):
    """Why there is no release."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--check", action="store_true", help="build twice and compare")
    parser.add_argument("--without-deb", action="store_true", help="where dpkg-deb is missing")
    chosen = parser.parse_args()
    try:
        version = find_version(PROJECT)
        refuse_unclean(PROJECT)
        build(chosen.directory, with_deb=not chosen.without_deb)
        if chosen.check:
            check(chosen.directory, with_deb=not chosen.without_deb)
    except Refused as error:
        sys.exit(f"no release: {error}")
    print(f"mirrord {version}: two builds are equal" if chosen.check else f"mirrord {version}")


def find_version(project: Path) -> str:
    """The version that `mirrord/__init__.py` decides. Raises Refused where others differ."""
    source = (project / "mirrord/__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0]
    if f'"mirrord-client=={version}",' not in (project / "pyproject.toml").read_text():
        raise Refused(f"pyproject.toml does not depend on mirrord-client=={version}")
    section = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(section, (project / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY'")
    return str(version)


def refuse_unclean(project: Path) -> None:
    if changed := run("git", "status", "--porcelain", cwd=project):
        raise Refused(f"the work tree differs from its commit:\n{changed}")


def check(first: Path, *, with_deb: bool) -> None:
    """Build again elsewhere, under other circumstances. Raises Refused where a byte differs."""
    with tempfile.TemporaryDirectory(prefix="mirrord-release-") as scratch:
        second = Path(scratch, "another", "place")
        os.environ.update(TZ="Asia/Tokyo", LC_ALL="C.UTF-8", PYTHONHASHSEED="7")
        former = os.umask(0o077)
        build(second, with_deb=with_deb)
        os.umask(former)
        names = sorted(path.name for path in second.iterdir())
        _, different, missing = filecmp.cmpfiles(first, second, names, shallow=False)
        if different or missing:
            raise Refused(f"two builds differ in {', '.join([*different, *missing])}")


def build(directory: Path, *, with_deb: bool) -> None:
    """Build HEAD into a directory."""
    commit_time = run("git", "log", "-1", "--format=%ct", cwd=PROJECT)
    os.environ["SOURCE_DATE_EPOCH"] = commit_time
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mirrord-source-") as scratch:
        source = Path(scratch, "mirrord")
        run("git", "clone", "--quiet", "--no-hardlinks", str(PROJECT), str(source))
        run("git", "checkout", "--quiet", run("git", "rev-parse", "HEAD", cwd=PROJECT), cwd=source)
        built = source / "dist"
        for project in (source / CLIENT, source):
            hatch = [sys.executable, "-m", "hatchling", "build", "-d", str(built)]
            run(*hatch, "-t", "sdist", "-t", "wheel", cwd=project)
        if with_deb:
            (source / ".venv").symlink_to(ENVIRONMENT)
            run("make", "deb", "--old-file=.venv/ready", cwd=source)
        write_bom(source, built / f"mirrord-{find_version(source)}.cdx.json")
        lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(built.iterdir())]
        (built / "SHA256SUMS").write_text("".join(lines))
        for path in built.iterdir():
            path.chmod(0o644)
            shutil.move(path, directory / path.name)


def write_bom(source: Path, path: Path) -> None:
    """What the daemon runs on, by the lock; CycloneDX's tool does not know a dynamic version."""
    options = ["--pyproject", "pyproject.toml", "--output-reproducible", "--short-PURLs"]
    options += ["--no-validate"]  # six times as slow
    command = [str(CYCLONEDX), "requirements", *options, "requirements.lock"]
    bom = json.loads(run(*command, cwd=source))
    bom["metadata"]["component"]["version"] = find_version(source)
    path.write_text(json.dumps(bom, indent=2, sort_keys=True) + "\n")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        name = " ".join([Path(command[0]).name, *command[1:]])
        raise Refused(f"{name} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
