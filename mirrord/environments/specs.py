"""Recipes of rows, and of the `swebench` package, which is read as text."""

import functools
import importlib.util
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..catalog import InstanceRow
from ..errors import InvalidRecipeError, InvalidRequestError, RecipeNotFoundError
from ..model import shown
from ..presence import is_file
from ..protocol import Recipe
from ..testlogs import SCRIPTS, command_of_scripts, parser_of_repo
from .recipes import RUNNERS, checked, key_of
from .requirements import pip_lines

# for rows that only say which Python they run on
_DEFAULT_SPEC = {
    "pip_packages": ["pytest"],
    "install": "python -m pip install -e .",
    "test_cmd": "pytest -rA",
}


def recipe_of(row: InstanceRow, *, frozen: bool = False) -> Recipe:
    """Return the recipe of an instance: that of its row, or else of the `swebench` package.

    With `frozen` the index is that of the instance's date. Raises RecipeNotFoundError, and
    InvalidRecipeError for recipes that need more than uv.
    """
    spec = dict(swebench_specs().get(row.repo.lower(), {}).get(row.version or "", {}))
    own = row.install_config or {}
    if own.keys() - {"log_parser", "test_files", "restored_files", *SCRIPTS}:
        spec = dict(own)
    if row.python_version:
        spec = {**(spec or _DEFAULT_SPEC), "python": row.python_version}
    image = str(spec.get("base_image_name") or "")
    if match := re.match(r"python[_:-]?(3\.\d+)", image):
        spec.setdefault("python", match[1])
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
    runner = RUNNERS.get(row.repo.lower(), [])
    return replace(recipe_of_spec(key_of(row), spec), index_date=date, runner=runner)


# where a format's images are, for rows that do not name a whole one
IMAGES = {
    "swe-bench": "swebench/sweb.eval.{arch}.{id_1776}",
    "swe-bench-multilingual": "swebench/sweb.eval.{arch}.{id_1776}",
    "swe-bench-pro": "jefzda/sweap-images:{image}",
    "gso": "slimshetty/gso:gso.eval.{arch}.{id}",
    "multi-swe-bench": "mswebench/{owner}_m_{name}:pr-{number}",
}

_PLACE = re.compile(r"\{(\w+)\}")
_PLAIN = "{image}"
# images of SWE-bench's family have their packages in this environment, which a login would activate
_CONDA = "/opt/miniconda3/bin/activate"
_ACTIVATE = f"if [ -f {_CONDA} ]; then . {_CONDA} testbed; fi"


def template_of(given: str | None, dataset_format: str) -> str:
    """Return the template for the images of a dataset. Raises InvalidRequestError."""
    template = given or IMAGES.get(dataset_format, _PLAIN)
    if unknown := sorted(set(_PLACE.findall(template)) - _PLACES):
        raise InvalidRequestError(
            f"cannot name images by {shown(template)}: it has {shown(unknown[0])}",
            hint=f"places are {', '.join(sorted(_PLACES))}, in braces",
        )
    return template


_PLACES = {"arch", "id", "id_1776", "id_s", "image", "name", "number", "owner"}


def image_of(row: InstanceRow, template: str) -> str | None:
    """Return the source of an instance's image; None if its row lacks what the template needs."""
    identity, repo = row.id.lower(), row.repo.lower()
    image = row.environment or ""
    if image and "/" in image and template in IMAGES.values():  # a whole name
        template = _PLAIN
    number = re.search(r"(\d+)$", identity)
    values = {
        "image": image.removeprefix("docker://"), "id": identity, "name": repo.rpartition("/")[2],
        "owner": repo.partition("/")[0], "number": number[1] if number else "",
        "id_1776": identity.replace("__", "_1776_"), "id_s": identity.replace("__", "_s_"),
        # SWE-bench's images are of x86_64 and arm64
        "arch": {"aarch64": "arm64"}.get(platform.machine(), platform.machine()),
    }  # fmt: skip
    if not all(values[name] for name in _PLACE.findall(template)):
        return None
    filled = _PLACE.sub(lambda place: values[place[1]], template)
    return filled if filled.startswith("docker://") else f"docker://{filled}"


def image_recipe_of(row: InstanceRow, key: str) -> Recipe | None:
    """Return how the tests of an instance run in its image; None if nothing says it."""
    spec = dict(swebench_specs().get(row.repo.lower(), {}).get(row.version or "", {}))
    own = row.install_config or {}
    runner, parser = RUNNERS.get(row.repo.lower(), []), own.get("log_parser")
    if command := command_of_scripts(own):
        if {"run_script", "parsing_script"} <= own.keys():
            parser = "parsing_script"
        parser = str(parser or parser_of_repo(row.repo))
        return Recipe(key=key, python="", test_command=command, runner=runner, log_parser=parser)
    test = " && ".join(_list(own, "test_cmd") or _list(spec, "test_cmd"))
    if not test:
        return None
    commands, variables = _variables_of({**spec, **own})
    return Recipe(
        key=key, python="", test_command="; ".join([_ACTIVATE, *commands, test]),
        variables=variables, runner=runner, log_parser=str(parser or parser_of_repo(row.repo)),
    )  # fmt: skip


_ASSIGNMENT = re.compile(r"\w+=\S*$")


def recipe_of_spec(key: str, spec: Mapping[str, Any]) -> Recipe:
    """Return the recipe of an `install_config`, or of a value of SWE-bench's mapping."""
    requirements, packages = _packages_of(spec)
    commands, variables = _variables_of(spec)
    host: dict[str, None] = {}
    pre_install = [left for line in _list(spec, "pre_install") if (left := _take_apt(line, host))]
    if any(_ASSIGNMENT.match(line) for line in pre_install):  # it applies to the commands after it
        pre_install = ["\n".join(["set -e", *pre_install])]
    install = [left for line in _list(spec, "install") if (left := _take_apt(line, host))]
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
        # a value that the shell expands stays a command
        match = re.fullmatch(r"\s*export\s+([A-Za-z_]\w*)=([^$`]*)", command)
        if match:
            variables[match[1]] = " ".join(shlex.split(match[2]))
        else:
            commands.append(command)
    return commands, variables


_APT = re.compile(r"(?:sudo |DEBIAN_FRONTEND=\w+ )*apt(?:-get)? ")


def _take_apt(command: str, packages: dict[str, None]) -> str:
    """Return a command without its calls of apt, which a sandbox cannot make; add the packages that
    they install to `packages`.
    """
    parts = re.split(r"\s*(?:&&|;)\s*", command)
    left = [part for part in parts if not _APT.match(part)]
    for part in parts:
        if _APT.match(part):
            words = part.partition(" install ")[2].split()
            packages.update(dict.fromkeys(word for word in words if not word.startswith("-")))
    return command if len(left) == len(parts) else " && ".join(filter(None, left))


def _list(spec: Mapping[str, Any], name: str) -> list[str]:
    value = spec.get(name)
    if value is None or value == "":
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


@functools.cache
def swebench_specs() -> dict[str, dict[str, dict[str, Any]]]:
    """Return SWE-bench's mapping by repository in lower case and version.

    Empty if the package is not installed; its fifth release has no mapping.
    """
    spec = importlib.util.find_spec("swebench")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place, "harness", "constants", "python.py")
        if is_file(path):
            return _read_specs(path)
    return {}


# variables of `swebench.harness.constants.python`, which its fifth release lacks
_SPECS = "MAP_REPO_VERSION_TO_SPECS_PY"
_FILES = "MAP_REPO_TO_REQS_PATHS"
_CONDA_FILES = "MAP_REPO_TO_ENV_YML_PATHS"


def _read_specs(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    # by itself: the package would load docker and modal
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
            str(version): {**paths, **values} for version, values in versions.items()
        }
    return mapping
