"""Packages made at run time, and a daemon that builds environments of them."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from daemons import Daemon, daemon


def wheel(directory: Path, name: str, version: str, files: Mapping[str, str]) -> Path:
    """A wheel of pure Python in a directory that serves as an index."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(each), text)
    return path


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
