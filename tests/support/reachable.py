"""Print a Python that every user may run: the one given, or a copy where its directories are closed.

`python reachable.py EXECUTABLE DIRECTORY`. Tests run programs as other users, and pyenv keeps its
Pythons in the home of root.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

UNUSED = shutil.ignore_patterns("__pycache__", "site-packages", "test", "idlelib", "*.a")


def main() -> None:
    executable, directory = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    is_open = all(os.stat(parent).st_mode & 0o001 for parent in executable.parents)
    print(executable if is_open else copy(executable, directory))


def copy(executable: Path, directory: Path) -> Path:
    """Copy its whole installation; returns the path of the copy."""
    ask = (str(executable), "-c", "import sys; print(sys.base_prefix)")
    prefix = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(prefix, directory, symlinks=True, ignore=UNUSED)
    (version,) = (path.name for path in directory.glob("lib/python3.*"))
    (directory / "lib" / version / "site-packages").mkdir()
    copied = directory / executable.relative_to(prefix)
    # A shared libpython is found by an absolute path, which the copy says relative to itself.
    former, relative = f"{prefix}/lib\0".encode(), b"$ORIGIN/../lib"
    copied.write_bytes(copied.read_bytes().replace(former, relative.ljust(len(former), b"\0")))
    return copied


if __name__ == "__main__":
    main()
