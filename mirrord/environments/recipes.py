"""Recipes: how an environment is built and its tests are run. No I/O.

A recipe names an interpreter, packages and commands. Agents may read it: it says nothing about an
instance's solution. `requirements` are installed first, then `packages`, which take precedence, as
in SWE-bench's scripts; then `pre_install` and `install` run in the tree of an instance.
"""

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator
from datetime import datetime

from ..catalog import InstanceRow
from ..errors import InvalidRecipeError
from ..model import ENVIRONMENT_KEY, MirrorName, shown
from ..protocol import MalformedError, Recipe, canonical
from ..testlogs import find_parser

# returns the text of a file of the tree, or None
ReadFile = Callable[[str], str | None]

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
FILE = "-r "
COMMIT = re.compile(r"[0-9a-f]{40}")
# a recipe with more lines, or with a longer one, is refused
_LINES, _CHARACTERS = 2000, 20_000

# what the projects' own runners are made of, besides the program in the test command
RUNNERS = {"sympy/sympy": ["sympy/testing/runtests.py", "sympy/utilities/runtests.py"]}


def digest_of(recipe: Recipe) -> str:
    """Return the hash of a recipe's canonical JSON."""
    return hashlib.sha256(canonical(recipe)).hexdigest()


def key_of(row: InstanceRow) -> str:
    """Return the key of an instance's environment, which other instances share.

    It is the name of the image, unless that was made for the instance alone or names a commit,
    which may be the gold one; then repository and version. There may be no recipe for it.
    """
    image, owner_name = row.environment, MirrorName.parse(row.repo).key
    if image and not _names_instance(image, row.id) and not COMMIT.search(image):
        return slug(image)
    if row.version:
        return slug(f"{owner_name}-{row.version}")
    return slug(f"{owner_name}-py{row.python_version}" if row.python_version else owner_name)


def _names_instance(image: str, instance: str) -> bool:
    # Docker allows no `__` in the name of an image: `_1776_` or `_s_` replaces it
    plain = re.sub(r"_(1776|s)_|__", "-", image.lower())
    return instance.lower().replace("__", "-") in plain


def slug(text: str) -> str:
    """Return a text as a key; one that is too long is cut and gets a hash."""
    key = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")
    if len(key) > 120 or not key:
        key = f"{key[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}".lstrip("-")
    return key


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


_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
# without @, behind which pip takes a URL
_REQUIREMENT = re.compile(rf"{NAME}\s*(?:\[[A-Za-z0-9 ,._-]*\])?\s*(?:[<>=!~(;][^@]*)?")
_DEBIAN = re.compile(r"[a-z0-9][a-z0-9.+-]+")


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
        is_file = line.startswith(FILE)
        if is_file and not all(is_inside(path) for path in alternatives(line)):
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
    if any(len(lines) > _LINES for lines in lists):
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


def is_inside(path: str) -> bool:
    parts = path.split("/")
    return bool(path) and path.isprintable() and not path.startswith("/") and ".." not in parts


def alternatives(line: str) -> list[str]:
    return [part.strip() for part in line.removeprefix(FILE).split("|")]


def recipes_of_toml(text: str, source: str) -> list[Recipe]:
    """Return the recipes of a file, one per table `[[environment]]`. Raises InvalidRecipeError."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refusal(source, f"not TOML: {error}") from None
    entries = tables.pop("environment", None)
    if tables or not isinstance(entries, list) or not entries:
        fact = f"{shown(next(iter(tables)))} is not" if tables else "it has none"
        raise _refusal(source, f"only [[environment]] tables are allowed; {fact}")
    recipes = []
    for number, table in enumerate(entries, 1):
        if "index_date" in table:
            table["index_date"] = str(table["index_date"])
        if unknown := sorted(table.keys() - Recipe.__annotations__.keys()):
            raise _refusal(source, f"environment {number} has an unknown key {unknown[0]}")
        try:
            recipes.append(checked(Recipe.from_json(table)))
        except MalformedError as error:
            raise _refusal(source, f"environment {number}: {error}") from error
    keys = [recipe.key for recipe in recipes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise _refusal(source, f"key {twice[0]} is used twice")
    return recipes


def _refusal(source: str, fact: str) -> InvalidRecipeError:
    return InvalidRecipeError(
        f"cannot read recipes from {source}: {fact}",
        hint="docs/environments.md has the grammar and an example",
    )
