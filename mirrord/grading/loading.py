"""What the runner of tests loads in a graded tree, compared with what it loads in the base.

A prober answers for both, and imports nothing of either. What is loaded from another place than in
the base, because of a path of the change, and is not code under test, steers the tests. No I/O.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..environments.probing import ModulePlace, ProbeAnswer
from ..quoting import encode_name, quote_name
from ..trees.reader import parents
from .context import is_test

_CONFIGURATION = frozenset(
    b"pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml".split()
)


class Loaded(NamedTuple):
    """What is loaded differently: the rule, the name of it, and the paths of the change that make
    the difference, without which it is as in the base; none if no path explains it.
    """

    rule: str
    name: str
    paths: tuple[bytes, ...]
    detail: str


def compare(base: ProbeAnswer, graded: ProbeAnswer, changed: Iterable[bytes]) -> Iterator[Loaded]:
    """Iterate over what the runner loads differently than in the base."""
    return _Comparison(base, graded, frozenset(changed)).iter_loaded()


class _Comparison(NamedTuple):
    base: ProbeAnswer
    graded: ProbeAnswer
    changed: frozenset[bytes]

    def iter_loaded(self) -> Iterator[Loaded]:
        yield from self._configuration()
        yield from self._distributions()
        yield from self._files("loaded-conftest", self.base.conftests, self.graded.conftests)
        yield from self._files("loaded-plugin", self.base.plugins, self.graded.plugins)
        yield from self._tests()
        yield from self._modules()

    def _configuration(self) -> Iterator[Loaded]:
        before, after = self.base.config, self.graded.config
        if before == after:
            return
        named = {encode_name(file) for config in (before, after) if (file := config["file"])}
        paths = named & self.changed
        paths = paths or {path for path in self.changed if path.split(b"/")[-1] in _CONFIGURATION}
        keys = before["values"].keys() | after["values"].keys()
        parts = [
            key for key in sorted(keys) if before["values"].get(key) != after["values"].get(key)
        ]
        parts += [part for part in ("file", "root", "error") if before[part] != after[part]]
        name = str(after["file"] or before["file"] or "")
        yield Loaded(
            "loaded-config",
            name,
            tuple(sorted(paths)),
            f"differs in {', '.join(map(quote_name, parts))}",
        )

    def _distributions(self) -> Iterator[Loaded]:
        before, after = self.base.distributions, self.graded.distributions
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                paths = (*self._above([path, path]), *self._below(encode_name(path)))
                yield Loaded("loaded-plugin", path, paths, "entry points")

    def _files(
        self, rule: str, before: list[ModulePlace], after: list[ModulePlace]
    ) -> Iterator[Loaded]:
        """Iterate over the files of either that the change made, changed or removed."""
        for place in _unique([*before, *after]):
            if paths := self._above(place):
                yield Loaded(rule, place[0], paths, "" if place in after else "removed")

    def _tests(self) -> Iterator[Loaded]:
        for test, (module, files) in self.graded.tests.items():
            before, files_before = self.base.tests.get(test, ("", []))
            if (module, files) != (before, files_before):
                places = [place for place in files if place not in files_before]
                places += [place for place in files_before if place not in files]
                paths = _unique_paths(map(self._made_by, places)) or self._markers(test)
                shown = ", ".join(quote_name(place[0]) for place in files) or "nothing"
                yield Loaded("loaded-test", test, paths, f"{quote_name(module)} is {shown}")
            for place in files[:-1]:
                if is_test(encode_name(place[0])) and (paths := self._above(place)):
                    detail = f"in the package {quote_name(place[0])}"
                    yield Loaded("loaded-test", test, paths, detail)

    def _modules(self) -> Iterator[Loaded]:
        of_tests = {"conftest", *(Path(test).stem for test in self.graded.tests)}
        for key, place in self.graded.modules.items():
            before = self.base.modules.get(key)
            # what the base has itself is code under test, wherever it is now
            is_code = before and not is_test(encode_name(before[0]))
            if place != before and not (is_code and Path(key).name not in of_tests):
                yield Loaded(
                    "loaded-module", key, self._made_by(place), f"is {quote_name(place[0])}"
                )
        for key, before in self.base.helpers.items():
            now = self.graded.helpers.get(key)
            if now != before and is_test(encode_name(before[0])):
                paths = self._made_by(now) if now else self._above(before)
                yield Loaded(
                    "loaded-module", key, paths, f"is {quote_name(now[0]) if now else 'removed'}"
                )

    # -- the paths of the change -------------------------------------------------------------------

    def _above(self, place: ModulePlace) -> tuple[bytes, ...]:
        """Return the path of the change that makes a file what it is: it, or a link above it."""
        for path in map(encode_name, place):
            for part in (*parents(path), path):
                if part in self.changed:
                    return (part,)
        return ()

    def _made_by(self, place: ModulePlace) -> tuple[bytes, ...]:
        """Return the paths of the change that make a module: of a package, all that it has."""
        path = encode_name(place[0])
        above, _, name = path.rpartition(b"/")
        package = above if above and name.startswith(b"__init__.") else path
        return tuple(dict.fromkeys([*self._above(place), *self._below(package)]))

    def _below(self, directory: bytes) -> tuple[bytes, ...]:
        return tuple(sorted(path for path in self.changed if path.startswith(directory + b"/")))

    def _markers(self, test: str) -> tuple[bytes, ...]:
        """Return the paths of the change that are `__init__` of a directory above a test."""
        above = {b"", *parents(encode_name(test))}
        return tuple(
            path
            for path in sorted(self.changed)
            if path.rpartition(b"/")[0] in above and path.endswith(b"__init__.py")
        )


def _unique_paths(groups: Iterable[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(path for group in groups for path in group))


def _unique(places: list[ModulePlace]) -> list[ModulePlace]:
    return [list(place) for place in dict.fromkeys(map(tuple, places))]
