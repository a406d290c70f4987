"""Packages that files of the tree name, in pip's spelling; no I/O."""

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import yaml

from ..errors import InvalidRecipeError
from ..model import shown
from ..protocol import Recipe
from .recipes import FILE, NAME, ReadFile, alternatives, checked, is_inside

# files of requirements that include each other; a circle ends there
_DEEP = 8


# withdrawn from PyPI; SWE-bench's scripts replace them too
_RENAMED = {"types-pkg_resources": "types-setuptools", "types-pkg-resources": "types-setuptools"}


def reads_tree(recipe: Recipe) -> bool:
    """Return whether the recipe names files of the tree, and so needs `expanded`."""
    return any(line.startswith(FILE) for line in recipe.requirements)


def expanded(recipe: Recipe, read: ReadFile) -> Recipe:
    """Replace the `-r` lines of a recipe by the packages that they name.

    As in SWE-bench's scripts, the project itself (`-e .`) is left out: it would be that of another
    commit. Options are left out, because they could name another index. Raises InvalidRecipeError.
    """
    lines: list[str] = []
    for line in recipe.requirements:
        lines += _lines_of(line, read, recipe.key) if line.startswith(FILE) else [line]
    return checked(replace(recipe, requirements=list(dict.fromkeys(lines))))


def _lines_of(line: str, read: ReadFile, key: str) -> Iterator[str]:
    paths = alternatives(line)
    for path in paths:
        if (text := read(path)) is not None:
            is_conda = path.endswith((".yml", ".yaml"))
            yield from _conda_file(text, path) if is_conda else _pip_file(text, path, read, 0)
            return
    raise InvalidRecipeError(
        f"cannot use recipe {key}: the tree has no {' and no '.join(paths)}",
        hint="name another file after -r, or the packages themselves",
    )


def _pip_file(text: str, path: str, read: ReadFile, depth: int) -> Iterator[str]:
    for raw in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*|\s--?hash[= ].*", "", raw).strip()
        if match := re.fullmatch(r"(?:-r|--requirement)[= ]?\s*(\S+)", line):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
            inner = read(other) if is_inside(other) and depth < _DEEP else None
            yield from _pip_file(inner or "", other, read, depth + 1)
        elif line and not line.startswith(("-", ".", "/")):
            bare = re.split(r"[<>=!~;\[ ]", line)[0]
            yield _RENAMED.get(bare, line)


def _conda_file(text: str, path: str) -> Iterator[str]:
    try:
        document = yaml.safe_load(text)
        entries = list(document["dependencies"])
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise InvalidRecipeError(f"cannot read {path}: it is no environment of conda") from error
    named = [entry for entry in entries if isinstance(entry, str)]
    yield from pip_lines(named)
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("pip"), list):
            yield from _pip_file("\n".join(map(str, entry["pip"])), path, lambda _: None, 0)


# programs and libraries that conda has and PyPI does not
_CONDA_ONLY = {
    *("cudatoolkit", "ffmpeg", "gcc", "gfortran", "git", "graphviz", "gxx", "hdf5", "imagemagick"),
    *("libgdal", "libnetcdf", "make", "mkl", "nodejs", "openblas", "pandoc", "proj", "r-base"),
    *("compilers", "c-compiler", "cxx-compiler", "fortran-compiler"),
}
_CONDA_ITSELF = {"python", "pip", "conda", "nomkl"}


def pip_lines(specs: Iterable[str]) -> Iterator[str]:
    """Translate packages from conda's spelling to pip's. Raises InvalidRecipeError for those that
    are not Python packages.
    """
    for spec in specs:
        text = spec.rpartition("::")[2].strip()
        match = re.fullmatch(rf"({NAME})\s*(.*)", text)
        name, version = (match[1].lower(), match[2].strip()) if match else (text, "")
        if name in _CONDA_ITSELF:
            continue
        if not match or name in _CONDA_ONLY or name.startswith("lib"):
            raise InvalidRecipeError(
                f"cannot install {shown(spec)} without conda: PyPI has no such package",
                hint="write a recipe of your own with host_packages: docs/environments.md",
            )
        if pinned := re.fullmatch(r"=([^=<>!~,]+)(=.*)?", version):  # conda's = matches a prefix
            number = pinned[1].strip().removesuffix(".*").removesuffix("*").rstrip(".")
            version = f"=={number}" if pinned[2] else f"=={number}.*"
        yield _RENAMED.get(name, f"{match[1]}{version}")
