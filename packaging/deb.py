"""Build two Debian packages of this tree: `make deb`, or `packaging/deb.py DIRECTORY`.

/usr/lib/mirrord is an environment with what requirements.lock names, by its hashes, and with our
own two wheels, for the Python of this Debian. `mirrord` has what `pip install mirrord` would have,
`mirrord-full` the packages of the extras. Units, manual pages and completions are made from the
program in there. The same tree, lock and SOURCE_DATE_EPOCH give the same bytes, anywhere.
"""

import argparse
import base64
import compileall
import csv
import gzip
import hashlib
import os
import py_compile
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from release import CLIENT, PROJECT, Refused, find_version, run

DEBIAN = PROJECT / "packaging/debian"
LOCK = PROJECT / "requirements.lock"
WHEELS = PROJECT / ".venv/wheels"
UV = PROJECT / ".venv/bin/uv"
TARGET = Path("/usr/lib/mirrord")
PYTHON = f"python3.{sys.version_info.minor}"
SITE = f"lib/{PYTHON}/site-packages"
PROGRAMS = ("mirrord", "git-remote-mirrord")
PACKAGES = ("mirrord", "mirrord-full")
SCRIPTS = ("postinst", "prerm", "postrm")
REVISION = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, nargs="?", help="without it: only download")
    parser.add_argument("--only", choices=PACKAGES, help="one of the two packages")
    chosen = parser.parse_args()
    os.umask(0o022)
    try:
        fetch_wheels()
        if chosen.directory:
            names = (chosen.only,) if chosen.only else PACKAGES
            print(*build(chosen.directory, names), sep="\n")
    except Refused as error:
        sys.exit(f"no package: {error}")


def build(directory: Path, names: Sequence[str]) -> list[Path]:
    """Build packages of these names into a directory; returns their paths."""
    if sys.base_prefix != "/usr":
        raise Refused(f"it is for the system's Python, and this is that of {sys.base_prefix}")
    commit_time = ("git", "log", "-1", "--format=%ct")
    at = int(os.environ.get("SOURCE_DATE_EPOCH") or run(*commit_time, cwd=PROJECT))
    os.environ["SOURCE_DATE_EPOCH"] = str(at)
    version = re.sub(r"(a|b|rc|\.dev)(\d+)$", r"~\1\2", find_version(PROJECT)) + f"-{REVISION}"
    architecture = run("dpkg", "--print-architecture")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mirrord-deb-") as scratch:
        stages = {name: Path(scratch, name) for name in PACKAGES}
        inside = TARGET.relative_to("/")
        environment, extras = (stages[name] / inside for name in PACKAGES)
        make_environment(environment, Path(scratch, "wheels"))
        move_extras(environment, extras)
        put_files(stages["mirrord"], environment, at)
        packages = []
        for name in names:
            stage = stages[name]
            compile_modules(stage / inside)
            put_documents(stage, name, version, at)
            put_control(stage, name, version, architecture)
            settle(stage, at)
            package = directory / f"{name}_{version}_{architecture}.deb"
            compression = ("-Zzstd", "-z3", "--threads-max=1")
            run("dpkg-deb", "--root-owner-group", *compression, "--build", str(stage), str(package))
            packages.append(package)
    return packages


def fetch_wheels() -> None:
    """Download what the lock names, unless that was done."""
    stamp, wanted = WHEELS / "lock", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(WHEELS, ignore_errors=True)
    chosen = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(LOCK))
    run(sys.executable, "-m", "pip", "download", "--quiet", *chosen, "-d", str(WHEELS))
    stamp.write_text(wanted)


def make_environment(environment: Path, ours: Path) -> None:
    """Install all wheels into an environment that works at TARGET."""
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").symlink_to(f"/usr/bin/{PYTHON}")
    config = "home = /usr/bin\ninclude-system-site-packages = false\n"
    (environment / "pyvenv.cfg").write_text(config)
    for project in (PROJECT / CLIENT, PROJECT):
        hatch = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(ours))
        run(*hatch, cwd=project)
    uv = (str(UV), "--quiet", "--no-config", "--offline", "pip")
    where = ("--python", str(environment / "bin/python"), "--link-mode", "copy", "--no-index")
    run(*uv, "sync", *where, "--require-hashes", "--find-links", str(WHEELS), str(LOCK))
    names = (f"mirrord=={find_version(PROJECT)}", f"mirrord-client=={find_version(PROJECT)}")
    run(*uv, "install", *where, "--no-cache", "--no-deps", "--find-links", str(ours), *names)
    (environment / ".lock").unlink()  # uv's
    for record in sorted((environment / SITE).glob("*.dist-info/RECORD")):
        settle_record(environment, record)


def move_extras(environment: Path, extras: Path) -> None:
    """Move what only extras need, as their RECORDs list it, to where the second package has it."""
    found = {canonicalize_name(each.name): each for each in installed(environment)}
    needed, left = set(), ["mirrord"]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            wanted = map(Requirement, found[name].requires or ())
            left += [
                canonicalize_name(each.name)
                for each in wanted
                if not each.marker or each.marker.evaluate({"extra": ""})
            ]
    for name in found.keys() - needed:
        for file in found[name].files or ():
            path = Path(os.path.normpath(environment / SITE / file))
            moved = extras / path.relative_to(environment)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)
    for path in sorted(environment.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def installed(environment: Path) -> list[Distribution]:
    return sorted(distributions(path=[str(environment / SITE)]), key=lambda each: each.name)


def compile_modules(environment: Path) -> None:
    compileall.compile_dir(
        environment / SITE, quiet=2, stripdir=str(environment), prependdir=str(TARGET),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def settle_record(environment: Path, record: Path) -> None:
    """Let scripts start the Python at TARGET, drop the time of the build, and say so in RECORD."""
    record.with_name("uv_cache.json").unlink(missing_ok=True)
    rows = list(csv.reader(record.read_text().splitlines()))
    rows = [row for row in rows if not row[0].endswith("/uv_cache.json")]
    for row in rows:
        path = Path(os.path.normpath(record.parents[1] / row[0]))
        if path.parent == environment / "bin" and path.read_bytes()[:2] == b"#!":
            data = path.read_bytes().replace(os.fsencode(environment), os.fsencode(TARGET))
            path.write_bytes(data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            row[1:] = [f"sha256={digest}", str(len(data))]
    with record.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def put_files(stage: Path, environment: Path, at: int) -> None:
    """Everything outside of the environment."""
    for name in PROGRAMS:
        link = stage / "usr/bin" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../lib/mirrord/bin/{name}")
    date = time.strftime("%Y-%m-%d", time.gmtime(at))
    script = str(PROJECT / "packaging/generated.py")
    run(str(environment / "bin/python"), "-I", "-B", script, str(stage / "usr"), str(TARGET), date)
    config = stage / "etc/mirrord/config.toml"
    config.parent.mkdir(parents=True)
    shutil.copy(PROJECT / "config.toml", config)
    shutil.copytree(PROJECT / "packaging/slurm", stage / "usr/share/mirrord/slurm")
    documents = stage / "usr/share/doc/mirrord"
    shutil.copytree(PROJECT / "docs", documents / "docs")
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md"):
        shutil.copy(PROJECT / name, documents)
    shutil.copytree(PROJECT / "examples", documents / "examples")


def put_documents(stage: Path, name: str, version: str, at: int) -> None:
    """What Debian asks of each package."""
    documents = stage / "usr/share/doc" / name
    documents.mkdir(parents=True, exist_ok=True)
    lines = copyright_lines(stage / TARGET.relative_to("/"))
    (documents / "copyright").write_text("".join(lines))
    entry = f"{name} ({version}) stable; urgency=medium\n\n  * See changelog.gz.\n\n"
    entry += f" -- {maintainer()}  {formatdate(at)}\n"
    for file, text in (
        ("changelog.gz", (PROJECT / "CHANGELOG.md").read_bytes()),
        ("changelog.Debian.gz", entry.encode()),
    ):
        (documents / file).write_bytes(gzip.compress(text, mtime=0))
    overrides = stage / "usr/share/lintian/overrides" / name
    overrides.parent.mkdir(parents=True)
    text = (DEBIAN / "lintian-overrides").read_text()
    overrides.write_text(text.replace("mirrord:", f"{name}:"))


def copyright_lines(environment: Path) -> Iterator[str]:
    """Our licence, and where those of the packages inside are."""
    yield (DEBIAN / "copyright").read_text()
    for each in installed(environment):
        known = each.metadata
        licence = known.get("License-Expression") or known.get("License") or "see its directory"
        yield f" {each.name} {each.version}: {licence.strip().splitlines()[0]}\n"


def maintainer() -> str:
    return re.findall(r"(?m)^Maintainer: (.*)$", (DEBIAN / "control").read_text())[0]


def put_control(stage: Path, name: str, version: str, architecture: str) -> None:
    """DEBIAN/, from the files of packaging/debian."""
    control = stage / "DEBIAN"
    files = [path for path in sorted(stage.rglob("*")) if path.is_file() and not path.is_symlink()]
    digests = ((hashlib.md5(path.read_bytes()).hexdigest(), path) for path in files)
    sums = "".join(f"{digest}  {path.relative_to(stage)}\n" for digest, path in digests)
    control.mkdir()
    (control / "md5sums").write_text(sums)
    if name == "mirrord":
        for file in ("conffiles", *SCRIPTS):
            shutil.copy(DEBIAN / file, control)
    minor = sys.version_info.minor
    values = {
        "VERSION": version,
        "ARCHITECTURE": architecture,
        "SIZE": str(sum((path.stat().st_size + 1023) // 1024 for path in files)),
        "PYTHON": f"python3 (>= 3.{minor}~), python3 (<< 3.{minor + 1}~)",
    }
    paragraphs = (DEBIAN / "control").read_text().split("\n\n")
    text = paragraphs[PACKAGES.index(name)].rstrip("\n") + "\n"
    (control / "control").write_text(re.sub(r"@(\w+)@", lambda found: values[found[1]], text))


def settle(stage: Path, at: int) -> None:
    """One time for all, and modes that no umask has a say in."""
    for path in (stage, *stage.rglob("*")):
        if not path.is_symlink():
            is_program = path.stat().st_mode & 0o100 and ".so" not in path.name
            is_open = path.is_dir() or is_program or path.name in SCRIPTS
            path.chmod(0o755 if is_open else 0o644)
        os.utime(path, (at, at), follow_symlinks=False)
    # upstream URLs may have passwords; the daemon reads it by CAP_DAC_READ_SEARCH
    if (config := stage / "etc/mirrord/config.toml").exists():
        config.parent.chmod(0o750)
        config.chmod(0o640)


if __name__ == "__main__":
    main()
