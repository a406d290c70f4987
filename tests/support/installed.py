"""The project as it is installed, for a booted machine: two wheels, unpacked into an environment on the system's Python."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]
LIBRARIES = Path(sysconfig.get_paths()["purelib"])
LIBRARIES_INSIDE = "/opt/libraries"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def why_not() -> str:
    """Why no machine could run what is installed here; empty where one can."""
    if sys.base_prefix != "/usr":
        return f"the tests run on {sys.base_prefix}, and only /usr is seen in a booted machine"
    return ""


def install(environment: Path) -> None:
    """Make an environment at `environment` that works at /opt/mirrord, with the libraries of this one at LIBRARIES_INSIDE."""
    site = environment / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    (environment / "bin").mkdir()
    (environment / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\n"
    )
    (environment / "bin" / "python").symlink_to(f"/usr/bin/{PYTHON}")
    script = environment / "bin" / "mirrord"
    script.write_text(
        "#!/opt/mirrord/bin/python\nimport sys\nfrom mirrord.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    shutil.copy2(Path(sys.prefix, "bin", "uv"), environment / "bin")
    for entry in LIBRARIES.iterdir():
        if "mirrord" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(f"{LIBRARIES_INSIDE}/{entry.name}")
    for built in wheels(environment.parent / "wheels"):
        with zipfile.ZipFile(built) as wheel:
            wheel.extractall(site)
    compileall.compile_dir(site / "mirrord", quiet=1)


def wheels(directory: Path) -> list[Path]:
    """The wheels of the client and of the daemon, built into `directory`."""
    for project in (PROJECT / "packaging/client", PROJECT):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return sorted(directory.glob("*.whl"))
