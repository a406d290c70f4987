"""Probes: an environment's Python says, in a sandbox, what its runner of tests would load.

The program is `probe.py`. It runs as builds do: by the builder, as the user of builds, in a
checkout that belongs to that user.
"""

import asyncio
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ResourceError
from ..host.processes import Owner
from ..protocol import Recipe
from .builder import build_owner, run_builder
from .probe import MARKER
from .steps import Order

_TIMEOUT_S = 120.0  # a cold start of Python and pytest takes seconds on a slow disk
# a probe imports the project's tests: it takes a processor while it runs
_AT_ONCE = 2


# a file as it is named, and after all links; relative to the tree, or absolute
ModulePlace = list[str]


class ProbeAnswer(NamedTuple):
    """What a runner reads and imports in a tree.

    `modules` are names that the environment, Python or the tests have, each in a directory of the
    tree; `helpers` are other names that tests and conftests import. `tests` has the module of each
    test, with the files that its import loads. `config` is what pytest itself reads.
    `distributions` are those in the tree, with a hash of their entry points. The content of
    `conftests` and `plugins` is run by pytest.
    """

    python: str
    pytest: str | None
    modules: dict[str, ModulePlace]
    helpers: dict[str, ModulePlace]
    tests: dict[str, tuple[str, list[ModulePlace]]]
    config: dict[str, Any]
    distributions: dict[str, str]
    conftests: list[ModulePlace]
    plugins: list[ModulePlace]


class Question(NamedTuple):
    """Paths of tests, and the recipe that says how they are run."""

    tests: tuple[str, ...]
    recipe: Recipe


@dataclass(eq=False, repr=False)
class Probes:
    """Asks environments what a runner would load. Belongs to one event loop.

    `service` is the socket of the build service.
    """

    service: Path
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    @cached_property
    def owner(self) -> Owner:
        return build_owner()

    @cached_property
    def _program(self) -> str:
        return Path(__file__).with_name("probe.py").read_text()

    async def ask(self, checkout: Path, question: Question) -> ProbeAnswer:
        """Ask about the tree and the environment of a checkout. Raises ResourceError."""
        recipe = question.recipe
        asked = {
            "tests": question.tests, "command": recipe.test_command, "variables": recipe.variables,
        }  # fmt: skip
        order = Order(
            tree=str(checkout / "tree"), environment=str(checkout / "environment"),
            scratch=str(checkout / "tree"), uv="", cache="", python=recipe.python,
            interpreter=None, index="", network=False, program=self._program,
            input=json.dumps(asked),
        )  # fmt: skip
        output = _Output()
        async with self._turns:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    failure = await run_builder(order, self.service, output.say)
            except TimeoutError:
                failure = f"it took longer than {_TIMEOUT_S:.0f} seconds"
        if failure is None and (answer := output.answer()) is not None:
            return answer
        raise _failed(failure or "it gave no answer", output.tail)


# what code that is not trusted writes beyond it is dropped
_ANSWER_BYTES = 64 << 20


class _Output:
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._bytes = 0

    def say(self, text: str) -> None:
        self._bytes += len(text)
        if self._bytes <= _ANSWER_BYTES:
            self._pieces.append(text)

    @property
    def tail(self) -> str:
        lines = "".join(self._pieces[-20:]).strip().splitlines()
        return lines[-1][:300] if lines else ""

    def answer(self) -> ProbeAnswer | None:
        """Return the answer; None if there is none that can be read."""
        _, marker, text = "".join(self._pieces).rpartition(f"\n{MARKER}")
        try:
            fields: dict[str, Any] = json.loads(text) if marker else {}
            tests = {path: (loaded[0], loaded[1]) for path, loaded in fields.pop("tests").items()}
            return ProbeAnswer(**fields, tests=tests)
        except (ValueError, TypeError, KeyError, IndexError):
            return None


def _failed(fact: str, said: str) -> ResourceError:
    return ResourceError(
        f"cannot ask the environment what its tests load: {fact}{': ' if said else ''}{said}",
        hint="see `mirrord doctor`; the environment may be damaged: build it again",
    )
