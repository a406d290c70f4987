"""The files that a test command is made of, by its recipe: those of the tree that it runs."""

import shlex
from collections.abc import Iterator

from ..protocol import Recipe


def files_of(recipe: Recipe) -> tuple[str, ...]:
    """Return patterns for the files of a recipe's runner: what it names, and each path of its test
    command, such as `bin/test` or `./tests/runtests.py`.
    """
    named = (pattern if pattern.startswith("/") else f"/{pattern}" for pattern in recipe.runner)
    return tuple(dict.fromkeys([*named, *_paths_in(recipe.test_command)]))


def _paths_in(command: str) -> Iterator[str]:
    try:
        words = shlex.split(command, comments=False)
    except ValueError:
        words = command.split()
    for word in words:
        path = word.strip(";&|()").removeprefix("./")
        is_path = "/" in path or path.endswith((".py", ".sh"))
        if is_path and not path.startswith(("/", "-")) and "=" not in path and path[-1:] != "/":
            yield f"/{path}"
