"""Packages made at run time, and a daemon that builds environments of them."""

from __future__ import annotations

import io
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

from daemons import Daemon, daemon


def wheel(
    directory: Path, name: str, version: str, files: Mapping[str, str], entry_points: str = ""
) -> Path:
    """A wheel of pure Python in a directory that serves as an index."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": entry_points} if entry_points else {}),
    }
    record = "".join(f"{each},,\n" for each in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(each), text)
    return path


_BACKEND = """
import zipfile

def build_wheel(directory, *ignored):
    hostile()
    with zipfile.ZipFile(f"{directory}/NAME-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("NAME.py", "")
        wheel.writestr("NAME-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: NAME\\nVersion: 1.0\\n")
        wheel.writestr("NAME-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("NAME-1.0.dist-info/RECORD", "")
    return "NAME-1.0-py3-none-any.whl"
"""


def source_distribution(directory: Path, name: str, hostile: str) -> None:
    """A package that is built by itself, and runs `hostile`, the body of a function, meanwhile."""
    files = {
        "pyproject.toml": f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "{name}"\nversion = "1.0"\n',
        "backend.py": f"{_BACKEND.replace('NAME', name)}\ndef hostile():\n{textwrap.indent(hostile, '    ')}\n",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }
    with tarfile.open(directory / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{name}-1.0/{path}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))


def wheel_of(directory: Path, *names: str) -> None:
    """Wheels of packages that are installed here, for environments without a network."""
    directory.mkdir(exist_ok=True)
    for name in names:
        found = distribution(name)
        named = f"{found.metadata['Name'].replace('-', '_').lower()}-{found.version}"
        with zipfile.ZipFile(directory / f"{named}-py3-none-any.whl", "w") as archive:
            for file in found.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    archive.write(file.locate(), str(file))


def recipe(key: str, *packages: str, **more: str) -> str:
    """A table of TOML; `more` are members as TOML writes them."""
    lines = [f'key = "{key}"', 'python = "3.11"', f"packages = {list(packages)}"]
    lines += [f"{name} = {value}" for name, value in more.items()]
    return "\n".join(["[[environment]]", *lines, ""])


@contextmanager
def building(
    text: str = "", index: str | None = None, user: int | None = None
) -> Iterator[tuple[Daemon, Path]]:
    """A daemon whose builds take packages from a directory alone."""
    with daemon(start=False, user=user) as made:
        packages = made.root / "packages"
        wheel(packages, "tiny", "1.0", {"tiny/__init__.py": "x = 1\n"})
        made.write_config(
            f'{text}[environments]\nindex = "{index or packages}"\nnetwork = {str(bool(index)).lower()}\n'
        )
        made.start()
        yield made, packages
