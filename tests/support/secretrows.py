"""Rows of many formats about repositories that are built at run time, a canary in each secret field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaries import Canaries
from gitrepos import Upstream


@dataclass(frozen=True)
class Fix:
    """A gold commit on a branch of its own, and what rows say of it.

    `NEWS` is in this commit alone; `source` is what the fix makes of `src/mod0.py`.
    """

    kind: str
    gold: str
    source: str
    patch: str | None
    test_patch: str | None
    failing: list[str]
    passing: list[str]


@dataclass
class Task:
    """A row. `secret` is a commit that it records besides the base, `public` the id members see."""

    fix: Fix
    id: str
    row: dict[str, Any]
    secret: str | None
    public: str = ""

    @property
    def dataset(self) -> str:
        return self.fix.kind


class Author:
    """Writes an upstream, and rows of each format with a canary in each field that is a secret."""

    def __init__(self, root: Path, secrets: Canaries) -> None:
        self.upstream, self.secrets = Upstream(root / "o" / "r"), secrets
        self.bugs = Upstream(root / "swesmith" / "o__r.1fd52536")
        self.base = self.upstream.history(3)[1]
        self.later = self.upstream.commit({"NEWS": secrets.plant("content after the base commit")})
        secrets.plant_commit("environment setup commit", self.later)

    def fix(self, kind: str) -> Fix:
        git, plant = self.upstream.git, self.secrets.plant
        git("checkout", "--quiet", "-b", f"fix-{kind}", self.base)
        source = f"value = '{plant(f'{kind}: patch')}'\n"
        test = f"assert '{plant(f'{kind}: test patch')}'\n"
        gold = self.upstream.commit(
            {
                "src/mod0.py": source,
                f"tests/test_{kind}.py": test,
                "NEWS": plant(f"{kind}: content of the gold commit"),
            },
            plant(f"{kind}: message of the gold commit"),
        )
        git("checkout", "--quiet", "main")
        self.secrets.plant_commit(f"{kind}: gold commit", gold)
        patch, test_patch = (
            git("diff", self.base, gold, "--", place) + "\n" for place in ("src", "tests")
        )
        return Fix(kind, gold, source, patch, test_patch, *self.tests(kind))

    def tests(self, kind: str) -> tuple[list[str], list[str]]:
        words = [self.secrets.plant(f"{kind}: {name}") for name in ("fail to pass", "pass to pass")]
        return [f"tests/test_it.py::{words[0]}"], [f"tests/test_it.py::{words[1]}"]

    def extras(self, kind: str, *names: str) -> dict[str, str]:
        """Columns that are not read, and more of them."""
        names = (*names, "problem_statement", "hints_text", "unknown_column")
        return {name: self.secrets.plant(f"{kind}: {name}") for name in names}

    def shared(self, fix: Fix, identity: str) -> dict[str, Any]:
        """The columns that most formats have."""
        return {
            "instance_id": identity,
            "repo": "o/r",
            "base_commit": self.base,
            "patch": fix.patch,
            "test_patch": fix.test_patch,
            "FAIL_TO_PASS": fix.failing,
            "PASS_TO_PASS": fix.passing,
            "created_at": "2021-01-01T00:00:00Z",
            "version": self.secrets.plant(f"{fix.kind}: version"),
            **self.extras(fix.kind),
        }

    def classic(self, kind: str = "swe-bench") -> Task:
        fix, identity = self.fix(kind), f"o__r-{kind}"
        row = self.shared(fix, identity) | {"environment_setup_commit": self.later}
        row |= {name: json.dumps(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        return Task(fix, identity, row, self.later)

    def rebench(self) -> Task:
        """Whose id ends in the commit that its environment is set up at."""
        fix, identity = self.fix("swe-rebench"), f"o__r-{self.later[:12]}"
        row = self.shared(fix, identity) | self.extras(fix.kind, "install_config", "image_name")
        row |= {"environment_setup_commit": self.later, "FAIL_TO_FAIL": fix.failing}
        return Task(fix, identity, row, self.later)

    def pro(self) -> Task:
        fix = self.fix("swe-bench-pro")
        identity = f"instance_o__r-{fix.gold}-vnan"
        row = self.shared(fix, identity) | {
            "before_repo_set_cmd": f"git reset --hard {self.base}\ngit clean -fd \n"
            f"git checkout {self.base} \ngit checkout {fix.gold} -- tests/test_it.py",
            "dockerhub_tag": f"o.r-o__r-{fix.gold}-vnan",
            "selected_test_files_to_run": str(fix.failing),
        }
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            row[name.lower()] = str(row.pop(name))
        return Task(fix, identity, row, fix.gold)

    def partial(self) -> Task:
        """A row with the id of another format, and without the columns that say what is in it."""
        fix = self.fix("generic")
        identity = f"instance_o__r-{fix.gold}-vnan"
        return Task(fix, identity, self.shared(fix, identity), None)

    def live(self) -> Task:
        fix, identity = self.fix("swe-bench-live"), "o__r-live"
        urls = [f"https://github.com/o/r/commit/{fix.gold}"]
        return Task(fix, identity, self.shared(fix, identity) | {"commit_urls": urls}, fix.gold)

    def multi(self) -> Task:
        fix = self.fix("multi-swe-bench")
        row = {
            "org": "o",
            "repo": "r",
            "number": 7,
            "base": {"label": "o:main", "ref": "main", "sha": self.base},
            "fix_patch": fix.patch,
            "test_patch": fix.test_patch,
            "fixed_tests": {key: {"run": "FAIL", "fix": "PASS"} for key in fix.failing},
            "p2p_tests": {key: {"run": "PASS", "fix": "PASS"} for key in fix.passing},
            **self.extras(fix.kind, "hints", "body"),
        }
        return Task(fix, "o__r-7", row, None)

    def nemo(self) -> Task:
        """A row in a row."""
        inner = self.classic("nemo-gym")
        metadata = {"instance_dict": json.dumps(inner.row)} | self.extras("nemo-gym", "golden")
        row = {"responses_create_params": {"input": [], "metadata": metadata}}
        return Task(inner.fix, inner.id, row, inner.secret)

    def r2e(self) -> Task:
        """Whose base commit is written as the parent of the gold commit."""
        kind = "r2e-gym"
        fix = replace(self.fix(kind), patch=None, test_patch=None, failing=[], passing=[])
        parsed = {"old_commit_hash": f"{fix.gold}^", "new_commit_hash": fix.gold, "file_diffs": []}
        row = {
            "repo_name": "o/r",
            "docker_image": f"namanjain12/r_final:{fix.gold}",
            "commit_hash": fix.gold,
            "parsed_commit_content": json.dumps(parsed | self.extras(kind)),
            **self.extras(kind, "relevant_files", "execution_result_content"),
        }
        return Task(fix, f"o__r-{fix.gold}", row, fix.gold)

    def smith(self) -> Task:
        """Whose base commit is at the branch that its id names."""
        fix, branch, _ = self.bug("swe-smith")
        return Task(fix, branch, self.bugged(fix, branch), None)

    def sandbox(self) -> Task:
        """Whose patch brings the bug in, so that the commit before its base is the answer."""
        fix, _, bug = self.bug("swe-minisandbox")
        row = self.bugged(fix, bug) | {"base_commit": bug, "python_version": "3.12"}
        return Task(fix, bug, row, None)

    def bug(self, kind: str) -> tuple[Fix, str, str]:
        """A fix that is already there, and a branch with its bug: the branch, and its tip."""
        branch, bugs = f"o__r.1fd52536.{kind}", self.bugs
        source = f"value = '{self.secrets.plant(f'{kind}: patch')}'\n"
        parent = bugs.commit({"src/mod0.py": source}, self.secrets.plant(f"{kind}: parent message"))
        self.secrets.plant_commit(f"{kind}: parent commit", parent)
        bugs.git("checkout", "--quiet", "-b", branch)
        bug = bugs.commit({"src/mod0.py": "value = None\n"})
        bugs.git("checkout", "--quiet", "main")
        patch = bugs.git("diff", parent, bug) + "\n"
        return Fix(kind, parent, source, patch, None, *self.tests(kind)), branch, bug

    def bugged(self, fix: Fix, identity: str) -> dict[str, Any]:
        row = self.shared(fix, identity) | {"repo": f"swesmith/{self.bugs.path.name}"}
        del row["base_commit"], row["test_patch"]
        return row | self.extras(fix.kind, "image_name")


AUTHORS: tuple[Callable[[Author], Task], ...] = (
    *(Author.classic, Author.rebench, Author.pro, Author.live, Author.multi, Author.nemo),
    *(Author.r2e, Author.smith, Author.sandbox, Author.partial),
)
