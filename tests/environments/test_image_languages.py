"""Projects in other languages, by their real tools: an image of Debian packages of this host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import images
import pytest
from gitrepos import Upstream
from image_bench import Bench, image_bench, static_registry
from sandbox_here import needs_sandbox

from mirrord.protocol import BuildReport

BASE = ("bash", "coreutils", "dash", "git", "grep", "mawk", "sed", "util-linux")
PACKAGES = ("bats", "cargo", "cmake", "gcc", "golang-go", "libc6-dev", "make", "nodejs")
NEEDED = ("skopeo", "umoci", "dpkg-query", "bats", "cargo", "cmake", "gcc", "go", "make", "node")
# Debian's: the image has the files of its packages
MISSING = [name for name in NEEDED if not shutil.which(name, path=os.defpath)]
pytestmark = [
    pytest.mark.release,  # an image of 1.1 GB takes minutes
    pytest.mark.timeout(1200),
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    needs_sandbox,
]


# documents, and three quarters of the toolchains: nothing here needs them
UNUSED = re.compile(
    r"/usr/share/(doc|man|locale|info|perl|icons)/|/usr/(include/node|lib/node_modules|lib/python3)"
    r"|/usr/(lib|share)/go-[^/]+/(pkg/[^/]+_race|pkg/[^/]+/cmd|src/cmd|test|api|misc)/"
    r"|/usr/bin/.*(lto-dump|cpack)|/usr/lib/.*/(lto1|perl|gconv|lib[alt]san)\b"
)


class Project(NamedTuple):
    """Files with a bug, `{}` where it is; `test` is the file that the test patch adds."""

    files: dict[str, str]
    source: str
    test: tuple[str, str]
    command: str
    parser: str


C_TEST = """int add(int, int);
int main(int c, char **v) { return v[1][0] == 'a' ? add(2, 2) != 4 : add(1, 2) != 3; }
"""
C_LIB = "int add(int a, int b) {\n  return {};\n}\n"
TAP = """#include <stdio.h>
int add(int, int);
int main() { printf("1..2\\n%sok 1 - adds\\n%sok 2 - three\\n",
  add(2, 2) == 4 ? "" : "not ", add(1, 2) == 3 ? "" : "not "); }
"""
PROJECTS = {
    "ctest": Project(
        {"lib.c": C_LIB, "CMakeLists.txt": "cmake_minimum_required(VERSION 3.13)\nproject(x C)\n"
         "enable_testing()\nadd_executable(t lib.c t.c)\nadd_test(NAME adds COMMAND t adds)\n"
         "add_test(NAME three COMMAND t three)\n"},
        "lib.c", ("t.c", C_TEST), "cmake -B b && cmake --build b && ctest --test-dir b", "ctest",
    ),
    "make": Project(
        {"lib.c": C_LIB, "Makefile": "check: t\n\t./t\nt: lib.c t.c\n\tgcc -o t lib.c t.c\n"},
        "lib.c", ("t.c", TAP), "make check", "tap",
    ),
    "go": Project(
        {"go.mod": "module x\n", "x.go": "package x\n\nfunc Add(a, b int) int {\n  return {}\n}\n"},
        "x.go",
        ("x_test.go", ('package x\n\nimport "testing"\n\nfunc check(t *testing.T, a, b int) {\n'
         "  if Add(a, 2) != b {\n    t.Fail()\n  }\n}\n\n"
         "func Test_adds(t *testing.T) { check(t, 2, 4) }\n"
         "func Test_three(t *testing.T) { check(t, 1, 3) }\n")),
        "GOCACHE=/tmp/go go test -v ./...", "gotest",
    ),
    "node": Project(
        {"x.js": "exports.add = (a, b) => {\n  return {};\n};\n"},
        "x.js",
        ("x.test.js", ('const t = require("node:test"), is = require("node:assert").equal;\n'
         'const { add } = require("./x.js");\n'
         't("adds", () => is(add(2, 2), 4));\nt("three", () => is(add(1, 2), 3));\n')),
        "node --test", "tap",
    ),
    "rust": Project(
        {"Cargo.toml": '[package]\nname = "x"\nversion = "0.1.0"\nedition = "2021"\n',
         "src/lib.rs": "pub fn add(a: i32, b: i32) -> i32 {\n  {}\n}\n"},
        "src/lib.rs",
        ("tests/t.rs", ("use x::add;\n#[test]\nfn adds() { assert_eq!(add(2, 2), 4) }\n"
         "#[test]\nfn three() { assert_eq!(add(1, 2), 3) }\n")),
        "CARGO_HOME=/tmp/c CARGO_TARGET_DIR=/tmp/t cargo test --offline", "cargo",
    ),
    "bats": Project(
        {"x.sh": "add() {\n  echo $(({}));\n}\n"},
        "x.sh",
        ("x.bats", ('load x.sh\n@test "adds" { [ "$(a=2 b=2 add)" = 4 ]; }\n'
         '@test "three" { [ "$(a=1 b=2 add)" = 3 ]; }\n')),
        "bats --tap x.bats", "bats",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with image_bench(tmp_path_factory.mktemp("images")) as made:
        yield made


def files_of(*packages: str) -> set[str]:
    """Return the files of packages and all that they depend on, below /usr as merged there."""
    form = "--showformat=${Package} ${db:Status-Abbrev},${Depends},${Pre-Depends},${Provides}\n"
    shown = subprocess.run(["dpkg-query", "--show", form], stdout=subprocess.PIPE, check=True)
    needs = dict[str, list[str]]()
    for line in shown.stdout.decode().splitlines():
        (name, _, status), others = line.partition(",")[0].partition(" "), line.partition(",")[2]
        if status.startswith("ii"):
            needs[name] = re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", others)
    waiting, asked, files = [*packages], set[str](), set[str]()
    while waiting:
        if (name := waiting.pop()) in asked or name not in needs:
            continue
        asked.add(name)
        waiting += needs[name]
        for path in Path("/var/lib/dpkg/info").glob(f"{name}*.list"):
            if path.stem.partition(":")[0] == name:
                files |= set(path.read_text().splitlines())
    files = {re.sub(r"^/(?=bin/|sbin/|lib)", "/usr/", path) for path in files}
    kept = {path for path in files if not UNUSED.match(path)}
    kept |= {str(path) for path in Path("/usr/bin").iterdir() if path.is_symlink()}
    kept |= {str(path) for path in Path("/etc/alternatives").iterdir()}
    return {path for path in kept if Path(path).is_symlink() or Path(path).is_file()}


def test_real_tools_of_other_languages_judge_rows(bench: Bench, tmp_path: Path) -> None:
    """FAIL_TO_PASS fails before and passes after the gold patch, in one image for all."""
    root, packed = tmp_path / "root", tmp_path / "layer.tar"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").mkdir()
    subprocess.run(["tar", "-C", root, "-cf", packed, "."], check=True)
    names = "\n".join(sorted(path.lstrip("/") for path in files_of(*BASE, *PACKAGES)))
    listed = ("tar", "-C", "/", "--no-recursion", "-rf", packed, "-T", "-")
    subprocess.run(listed, input=names.encode(), check=True)
    images.oci(tmp_path / "i", [packed.read_bytes()], {"Env": ["PATH=/usr/bin"]})
    packed.unlink()
    rows = []
    for name, project in PROJECTS.items():
        upstream = Upstream(tmp_path / name)
        # right for three by chance
        wrong = {path: text.replace("{}", "3", 1) for path, text in project.files.items()}
        right = project.files[project.source].replace("{}", "a + b", 1)
        base = upstream.commit({**wrong, ".gitignore": "/b\n/t\n"})
        patches = []
        for path, text in ((project.source, right), project.test):
            commit = upstream.commit({path: text})
            patches.append(upstream.git("diff", f"{commit}~1", commit))
        bench.client.wait(bench.client.add_mirror(f"l/{name}", url=upstream.url))
        tests = ["Test_adds", "Test_three"] if name == "go" else ["adds", "three"]
        rows.append({
            "instance_id": f"l__{name}-1", "repo": f"l/{name}", "base_commit": base,
            "image_name": "o/i", "patch": patches[0] + "\n", "test_patch": patches[1] + "\n",
            "FAIL_TO_PASS": tests[:1], "PASS_TO_PASS": tests[1:],
            "install_config": {"test_cmd": project.command, "log_parser": project.parser},
        })  # fmt: skip
    lines = (json.dumps(row).encode() + b"\n" for row in rows)
    assert bench.client.wait(bench.client.import_dataset(lines, name="l")).error is None
    with static_registry(tmp_path / "i") as served:
        template = f"docker://{served.host}/{{image}}:latest"
        told = bench.client.wait(
            bench.client.build_environments(dataset="l", images=True, image_name=template)
        )
    assert BuildReport.from_json(told.result).failed == []
    words = ("rehearse", "--dataset", "l", "--run", "--json", "--logs", str(tmp_path / "logs"))
    command = [sys.executable, "-m", "mirrord", "--socket", str(bench.made.socket), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = json.loads(ran.stdout)["instances"]
    logs = {log: Path(log).read_text()[-2000:] for each in answer for log in each["logs"]}
    assert {each["instance"]: each["reason"] for each in answer} == {
        row["instance_id"]: "" for row in rows
    }, logs
    steps = [{step["name"]: step["outcome"] for step in each["steps"]} for each in answer]
    assert [each["tests after"] for each in steps] == ["ok"] * len(PROJECTS)
    bench.remove(BuildReport.from_json(told.result).ready[0])
