"""`apply --strategy tolerant` beside the commands with which SWE-bench applies a model's patch.

Takes gold and test patches of datasets (.jsonl, .parquet) whose repositories are below a directory
of bare mirrors (`owner+name/repo`, `owner__name`), spoils each as models and mails do, and applies
it with the real commands in a plain clone and with mirrord over the base tree. Exit status 1 where
the commands take a patch that mirrord does not, or with another tree.

    python benchmarks/graders.py --mirrors DIR [--each N] DATASET...
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

import pyarrow.parquet

from mirrord.errors import MirrordError
from mirrord.git.objects.repository import open_objects
from mirrord.model import ApplyStrategy
from mirrord.patches.fit import BaseFiles
from mirrord.patches.strategies import apply_patch
from mirrord.trees.manifest import blob_id

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from random_patches import MUTATIONS, Oracle

SPOILED = ["nothing", "crlf", "context", "counts", "prose", "blanks", "shifted"]
Result = dict[bytes, tuple[int, str]] | None


def rows(path: Path) -> list[dict[str, str]]:
    if path.suffix == ".parquet":
        columns = ["instance_id", "repo", "base_commit", "patch", "test_patch"]
        table = pyarrow.parquet.read_table(path, columns=columns)
        return list(table.to_pylist())
    return [json.loads(line) for line in path.read_text().splitlines()]


def find_mirror(mirrors: Path, repo: str) -> Path | None:
    owner, _, name = repo.lower().partition("/")
    for path in mirrors.iterdir():
        if path.name.lower() in (f"{owner}+{name}", f"{owner}__{name}"):
            return path / "repo" if (path / "repo").exists() else path
    return None


def instances(
    datasets: list[Path], mirrors: Path, each: int
) -> Iterator[tuple[Path, dict[str, str]]]:
    """At most `each` of every repository, none twice."""
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    for row in (row for path in datasets for row in rows(path)):
        mirror = find_mirror(mirrors, row["repo"])
        if mirror and row["instance_id"] not in seen and counts[row["repo"]] < each:
            seen.add(row["instance_id"])
            counts[row["repo"]] += 1
            yield mirror, row


def ours(mirror: Path, tree: str, patch: bytes, scratch: Path) -> tuple[Result, str]:
    """The whole tree afterwards, and the strategy."""
    with open_objects(mirror) as objects:
        files = BaseFiles(objects, tree)
        try:
            done = apply_patch(files, patch, scratch=scratch, strategy=ApplyStrategy.TOLERANT)
        except MirrordError as error:
            return None, error.code
        return {
            at.path: (at.mode or 0, blob_id(at.data).hex()) for at in done.changes
        }, done.strategy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("datasets", nargs="+", type=Path)
    parser.add_argument("--mirrors", type=Path, required=True)
    parser.add_argument("--each", type=int, default=10, help="instances of each repository")
    options = parser.parse_args()
    taken: Counter[tuple[str, str, str]] = Counter()
    wrong = 0
    with tempfile.TemporaryDirectory() as area:
        oracles: dict[Path, Oracle] = {}
        for mirror, row in instances(options.datasets, options.mirrors, options.each):
            if mirror not in oracles:
                oracles[mirror] = Oracle(Path(area, str(len(oracles))), mirror)
            oracle = oracles[mirror]
            if (tree := oracle.tree_of(row["base_commit"])) is None:
                continue
            for field, name in product(("patch", "test_patch"), SPOILED):
                spoiled = MUTATIONS[name](Random(row["instance_id"]), row[field].encode())
                wanted = oracle.apply_as_graders(tree, spoiled)
                got, how = ours(mirror, tree, spoiled, Path(area, "scratch"))
                taken[name, "refused" if wanted is None else "taken", how] += 1
                if wanted is not None and got != oracle.changes(tree, wanted):
                    wrong += 1
                    print(f"{row['instance_id']} {field} {name}: {how}, but another tree")
    for (name, by_commands, how), count in sorted(taken.items()):
        print(f"{count:5} {name:9} {by_commands:8} by the commands; mirrord: {how}")
    print(f"{sum(taken.values())} patches, {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
