"""Recipes: how an environment is built and its tests are run. No I/O but for the swebench package.

A recipe names an interpreter, packages and commands. Agents may read it: it says nothing about an
instance's solution. `requirements` are installed first, then `packages`, which take precedence, as
in SWE-bench's scripts; then `pre_install` and `install` run in the tree of an instance.
"""

import functools
import hashlib
import importlib.util
import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ..catalog import InstanceRow
from ..errors import InvalidRecipeError, RecipeNotFoundError
from ..model import ENVIRONMENT_KEY, MirrorName, shown
from ..protocol import MalformedError, Recipe, canonical
from ..testlogs import find_parser, parser_of_repo

ReadFile = Callable[[str], str | None]
"""Returns the text of a file of the tree, or None."""

_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REQUIREMENT = re.compile(rf"{_NAME}\s*(?:\[[A-Za-z0-9 ,._-]*\])?\s*(?:[<>=!~(;][^@]*)?")
_DEBIAN = re.compile(r"[a-z0-9][a-z0-9.+-]+")
_FILE = "-r "
_COMMIT = re.compile(r"[0-9a-f]{40}")
# a recipe with more lines, or with a longer one, is refused
_LINES, _CHARACTERS = 2000, 20_000
# files of requirements that include each other; a circle ends there
_DEEP = 8

_CONDA_ONLY = {
    *("cudatoolkit", "ffmpeg", "gcc", "gfortran", "git", "graphviz", "gxx", "hdf5", "imagemagick"),
    *("libgdal", "libnetcdf", "make", "mkl", "nodejs", "openblas", "pandoc", "proj", "r-base"),
    *("compilers", "c-compiler", "cxx-compiler", "fortran-compiler"),
}
"""Programs and libraries that conda has and PyPI does not."""
_CONDA_ITSELF = {"python", "pip", "conda", "nomkl"}
_RUNNERS = {"sympy/sympy": ["sympy/testing/runtests.py", "sympy/utilities/runtests.py"]}
"""What the projects' own runners are made of, besides the program in the test command."""
_RENAMED = {"types-pkg_resources": "types-setuptools", "types-pkg-resources": "types-setuptools"}
"""Withdrawn from PyPI; SWE-bench's scripts replace them too."""


def digest_of(recipe: Recipe) -> str:
    """Return the hash of a recipe's canonical JSON."""
    return hashlib.sha256(canonical(recipe)).hexdigest()


def key_of(row: InstanceRow) -> str:
    """Return the key of an instance's environment, which other instances share.

    It is the name of the image, unless that was made for the instance alone or names a commit,
    which may be the gold one; then repository and version. There may be no recipe for it.
    """
    image, owner_name = row.environment, MirrorName.parse(row.repo).key
    if image and not _names_instance(image, row.id) and not _COMMIT.search(image):
        return _slug(image)
    if row.version:
        return _slug(f"{owner_name}-{row.version}")
    return _slug(f"{owner_name}-py{row.python_version}" if row.python_version else owner_name)


def _names_instance(image: str, instance: str) -> bool:
    # Docker allows no `__` in the name of an image: `_1776_` or `_s_` replaces it
    plain = re.sub(r"_(1776|s)_|__", "-", image.lower())
    return instance.lower().replace("__", "-") in plain


def _slug(text: str) -> str:
    """Return a text as a key; one that is too long is cut and gets a hash."""
    found = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    if len(found) > 120 or not found:
        found = f"{found[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}".lstrip("-")
    return found


# -- validation ------------------------------------------------------------------------------------


def checked(recipe: Recipe) -> Recipe:
    """Return a valid recipe. Raises InvalidRecipeError with all faults."""
    faults = list(_iter_faults(recipe))
    if faults:
        raise InvalidRecipeError(
            f"cannot use recipe {shown(recipe.key)}: {'; '.join(faults[:20])}",
            hint="docs/environments.md has the grammar and an example",
            faults=faults,
        )
    return recipe


def _iter_faults(recipe: Recipe) -> Iterator[str]:
    if not ENVIRONMENT_KEY.fullmatch(recipe.key):
        yield "key has a-z, 0-9, '.', '_' and '-', begins with a letter or digit, at most 200"
    if not _PYTHON.fullmatch(recipe.python):
        yield f"python {shown(recipe.python)} is no version such as 3.11"
    if recipe.index_date is not None and not _is_time(recipe.index_date):
        yield f"index_date {shown(recipe.index_date)} is no date such as 2023-05-01"
    for name in ("pre_install", "install"):
        yield from _faults_of_commands(name, getattr(recipe, name))
    yield from _faults_of_commands("test_command", [recipe.test_command or "true"])
    for line in recipe.requirements:
        is_file = line.startswith(_FILE)
        if is_file and not all(_is_inside(each) for each in _alternatives(line)):
            yield f"requirements: {shown(line)} leads out of the tree"
        elif not is_file and not _REQUIREMENT.fullmatch(line):
            yield f"requirements: {shown(line)} is neither a package nor -r FILE"
    for line in recipe.packages:
        if not _REQUIREMENT.fullmatch(line):
            yield f"packages: {shown(line)} is no package, such as numpy==1.26.4"
    for name in recipe.host_packages:
        if not _DEBIAN.fullmatch(name):
            yield f"host_packages: {shown(name)} is no name of a Debian package"
    for name, value in recipe.variables.items():
        if not _VARIABLE.fullmatch(name):
            yield f"variables: {shown(name)} is no name of a variable"
        elif "\0" in value or len(value) > _CHARACTERS:
            yield f"variables: the value of {name} is too long or has NUL"
    if find_parser(recipe.log_parser) is None:
        yield f"log_parser {shown(recipe.log_parser)} is unknown"
    lists = (recipe.requirements, recipe.packages, recipe.host_packages, recipe.variables)
    if any(len(each) > _LINES for each in lists):
        yield f"it has more than {_LINES} lines"


def _faults_of_commands(name: str, commands: list[str]) -> Iterator[str]:
    for command in commands:
        if not command.strip() or "\0" in command or len(command) > _CHARACTERS:
            yield f"{name}: {shown(command)} is empty, too long, or has NUL"


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_inside(path: str) -> bool:
    parts = path.split("/")
    return bool(path) and path.isprintable() and not path.startswith("/") and ".." not in parts


def _alternatives(line: str) -> list[str]:
    return [each.strip() for each in line.removeprefix(_FILE).split("|")]


# -- files of the tree that name packages ----------------------------------------------------------


def reads_tree(recipe: Recipe) -> bool:
    """Return whether the recipe names files of the tree, and so needs `expanded`."""
    return any(line.startswith(_FILE) for line in recipe.requirements)


def expanded(recipe: Recipe, read: ReadFile) -> Recipe:
    """Replace the `-r` lines of a recipe by the packages that they name.

    As in SWE-bench's scripts, the project itself (`-e .`) is left out: it would be that of another
    commit. Options are left out, because they could name another index. Raises InvalidRecipeError.
    """
    lines: list[str] = []
    for line in recipe.requirements:
        lines += _lines_of(line, read, recipe.key) if line.startswith(_FILE) else [line]
    return checked(replace(recipe, requirements=list(dict.fromkeys(lines))))


def _lines_of(line: str, read: ReadFile, key: str) -> Iterator[str]:
    paths = _alternatives(line)
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
            inner = read(other) if _is_inside(other) and depth < _DEEP else None
            yield from _pip_file(inner or "", other, read, depth + 1)
        elif line and not line.startswith(("-", ".", "/")):
            bare = re.split(r"[<>=!~;\[ ]", line)[0]
            yield _RENAMED.get(bare, line)


def _conda_file(text: str, path: str) -> Iterator[str]:
    try:
        found = yaml.safe_load(text)
        entries = list(found["dependencies"])
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise InvalidRecipeError(f"cannot read {path}: it is no environment of conda") from error
    named = [each for each in entries if isinstance(each, str)]
    yield from pip_lines(named)
    for each in entries:
        if isinstance(each, dict) and isinstance(each.get("pip"), list):
            yield from _pip_file("\n".join(map(str, each["pip"])), path, lambda _: None, 0)


def pip_lines(specs: Iterable[str]) -> Iterator[str]:
    """Translate packages from conda's spelling to pip's. Raises InvalidRecipeError for those that
    are not Python packages.
    """
    for spec in specs:
        text = spec.rpartition("::")[2].strip()
        match = re.fullmatch(rf"({_NAME})\s*(.*)", text)
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


_SPECS = "MAP_REPO_VERSION_TO_SPECS_PY"
_FILES = "MAP_REPO_TO_REQS_PATHS"
_CONDA_FILES = "MAP_REPO_TO_ENV_YML_PATHS"
_DEFAULT_SPEC = {
    "pip_packages": ["pytest"],
    "install": "python -m pip install -e .",
    "test_cmd": "pytest -rA",
}
"""For rows that only say which Python they run on."""

_ASSIGNMENT = re.compile(r"\w+=\S*$")
_APT = re.compile(r"(?:sudo |DEBIAN_FRONTEND=\w+ )*apt(?:-get)? ")


# -- rows ------------------------------------------------------------------------------------------


def recipe_of(row: InstanceRow, *, frozen: bool = False) -> Recipe:
    """Return the recipe of an instance: that of its row, or else of the `swebench` package.

    With `frozen` the index is that of the instance's date. Raises RecipeNotFoundError, and
    InvalidRecipeError for recipes that need more than uv.
    """
    spec = dict(swebench_specs().get(row.repo.lower(), {}).get(row.version or "", {}))
    own = row.install_config or {}
    if own.keys() - {"log_parser"}:
        spec = dict(own)
    if row.python_version:
        spec = {**(spec or _DEFAULT_SPEC), "python": row.python_version}
    image = str(spec.get("base_image_name") or "")
    if found := re.match(r"python[_:-]?(3\.\d+)", image):
        spec.setdefault("python", found[1])
    elif image:
        raise InvalidRecipeError(
            f"cannot use the recipe of {row.id}: it builds on {shown(image)}, not on Python",
            hint="environments are made by uv, for projects in Python",
        )
    if not spec.get("python"):
        raise RecipeNotFoundError(
            f"cannot make a recipe for {row.id}: neither its row nor the swebench package has one",
            hint='`pip install "swebench<5"` beside mirrord, or import a recipe of your own:'
            " `mirrord environment import FILE`",
            instance=row.id,
        )
    spec.setdefault("log_parser", own.get("log_parser") or parser_of_repo(row.repo))
    date = row.created_at.isoformat() if frozen and row.created_at else None
    runner = _RUNNERS.get(row.repo.lower(), [])
    return replace(recipe_of_spec(key_of(row), spec), index_date=date, runner=runner)


def recipe_of_spec(key: str, spec: Mapping[str, Any]) -> Recipe:
    """Return the recipe of an `install_config`, or of a value of SWE-bench's mapping."""
    requirements, packages = _packages_of(spec)
    commands, variables = _variables_of(spec)
    host: dict[str, None] = {}
    pre_install = [left for each in _list(spec, "pre_install") if (left := _take_apt(each, host))]
    if any(_ASSIGNMENT.match(each) for each in pre_install):  # it applies to the commands after it
        pre_install = ["\n".join(["set -e", *pre_install])]
    install = [left for each in _list(spec, "install") if (left := _take_apt(each, host))]
    test = " && ".join(_list(spec, "test_cmd"))
    return checked(
        Recipe(
            key=key,
            python=str(spec["python"]),
            pre_install=pre_install,
            requirements=requirements,
            packages=packages,
            install=install,
            test_command="; ".join([*commands, test]) if test else "",
            variables=variables,
            log_parser=str(spec.get("log_parser") or "pytest"),
            host_packages=list(host),
        )
    )


def _packages_of(spec: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines of `requirements` and of `packages`."""
    named = _list(spec, "packages")
    requirements: list[str] = []
    if named == ["requirements.txt"]:
        requirements = [f"-r {path}" for path in _list(spec, "reqs_path") or named]
        named = []
    elif named == ["environment.yml"]:
        requirements = [f"-r {path}" for path in _list(spec, "env_yml_path") or named]
        named = []
    words = [word for text in named for word in shlex.split(text)]
    return requirements, [*pip_lines(words), *_list(spec, "pip_packages")]


def _variables_of(spec: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return the commands before the test command, and the variables that `export` sets."""
    variables = {str(name): str(value) for name, value in (spec.get("env_vars") or {}).items()}
    commands = []
    for command in _list(spec, "eval_commands"):
        match = re.fullmatch(r"\s*export\s+([A-Za-z_]\w*)=([^$`]*)", command)
        if match:
            variables[match[1]] = " ".join(shlex.split(match[2]))
        else:
            commands.append(command)
    return commands, variables


def _take_apt(command: str, found: dict[str, None]) -> str:
    """Return a command without its calls of apt, which a sandbox cannot make; add the packages that
    they install to `found`.
    """
    parts = re.split(r"\s*(?:&&|;)\s*", command)
    left = [part for part in parts if not _APT.match(part)]
    for part in parts:
        if _APT.match(part):
            words = part.partition(" install ")[2].split()
            found.update(dict.fromkeys(word for word in words if not word.startswith("-")))
    return command if len(left) == len(parts) else " && ".join(filter(None, left))


def _list(spec: Mapping[str, Any], name: str) -> list[str]:
    value = spec.get(name)
    if value is None or value == "":
        return []
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


# -- the swebench package --------------------------------------------------------------------------


@functools.cache
def swebench_specs() -> dict[str, dict[str, dict[str, Any]]]:
    """Return SWE-bench's mapping by repository in lower case and version.

    Empty if the package is not installed; its fifth release has no mapping.
    """
    found = importlib.util.find_spec("swebench")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place, "harness", "constants", "python.py")
        if path.is_file():
            return _read_specs(path)
    return {}


def _read_specs(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    spec = importlib.util.spec_from_file_location("_swebench_constants", path)
    if spec is None or spec.loader is None:
        return {}
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files, conda_files = getattr(module, _FILES, {}), getattr(module, _CONDA_FILES, {})
    mapping: dict[str, dict[str, dict[str, Any]]] = {}
    for repo, versions in getattr(module, _SPECS, {}).items():
        paths = {
            "reqs_path": "|".join(files.get(repo, ())),
            "env_yml_path": "|".join(conda_files.get(repo, ())),
        }
        mapping[repo.lower()] = {
            str(version): {**paths, **each} for version, each in versions.items()
        }
    return mapping


# -- TOML ------------------------------------------------------------------------------------------


def recipes_of_toml(text: str, source: str) -> list[Recipe]:
    """Return the recipes of a file, one per table `[[environment]]`. Raises InvalidRecipeError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refusal(source, f"not TOML: {error}") from None
    found = tables.pop("environment", None)
    if tables or not isinstance(found, list) or not found:
        fact = f"{shown(next(iter(tables)))} is not" if tables else "it has none"
        raise _refusal(source, f"only [[environment]] tables are allowed; {fact}")
    recipes = []
    for number, table in enumerate(found, 1):
        if "index_date" in table:
            table["index_date"] = str(table["index_date"])
        if unknown := sorted(table.keys() - Recipe.__annotations__.keys()):
            raise _refusal(source, f"environment {number} has an unknown key {unknown[0]}")
        try:
            recipes.append(checked(Recipe.from_json(table)))
        except MalformedError as error:
            raise _refusal(source, f"environment {number}: {error}") from error
    keys = [each.key for each in recipes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise _refusal(source, f"key {twice[0]} is used twice")
    return recipes


def _refusal(source: str, fact: str) -> InvalidRecipeError:
    return InvalidRecipeError(
        f"cannot read recipes from {source}: {fact}",
        hint="docs/environments.md has the grammar and an example",
    )
