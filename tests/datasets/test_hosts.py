"""Rows that name hosts: one name never means two upstreams."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import daemon
from dataset_rows import row
from forge import serving
from gitrepos import Upstream

from mirrord.datasets.hosts import Hosts
from mirrord.datasets.reading import ReadResult, read_dataset
from mirrord.mirrors.upstreams.upstream import LOCAL
from mirrord.model import MirrorName

KNOWN = {"o__n": "forge.example.com", "at__port": "forge.example.com:8443"}


def read(tmp_path: Path, *repos: str, default: str = "github.com") -> tuple[ReadResult, list[str]]:
    path, spool = tmp_path / "rows.jsonl", tmp_path / "spool"
    rows = [row(number, repo=repo) for number, repo in enumerate(repos)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    result = read_dataset(path, path.name, None, spool, Hosts(default, KNOWN))
    return result, [json.loads(line)["mirror"] for line in spool.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("repos", "mirrors", "urls"),
    [
        (["https://github.com/a/b"], ["a__b"], {}),
        (["https://GITHUB.com/a/b.git", "git@github.com:a/b"], ["a__b", "a__b"], {}),
        (["o/n", "https://forge.example.com/o/n"], ["o__n", "o__n"], {}),
        (["ssh://git@forge.example.com:2222/o/n"], ["o__n"], {}),
        (["https://github.com/o/n"], ["github.com+o__n"],
         {"github.com+o__n": "https://github.com/o/n"}),
        (["https://else.where/a/b.git"], ["a__b"], {"a__b": "https://else.where/a/b.git"}),
        (["a/b", "https://else.where/a/b"], ["a__b", "else.where+a__b"],
         {"else.where+a__b": "https://else.where/a/b"}),
        (["https://u:p@else.where/a/b"], ["a__b"], {"a__b": "https://else.where/a/b"}),
        (["https://else.where/g/sub/p"], ["g+sub__p"], {"g+sub__p": "https://else.where/g/sub/p"}),
        (["https://else.where/g/sub/p/-/tree/main"], ["g+sub__p"],
         {"g+sub__p": "https://else.where/g/sub/p"}),
        (["g/sub/p"], ["g+sub__p"], {}),
        (["https://else.where:81/p.git"], ["else.where-81__p"],
         {"else.where-81__p": "https://else.where:81/p.git"}),
        (["https://forge.example.com:9/at/port"], ["forge.example.com-9+at__port"],
         {"forge.example.com-9+at__port": "https://forge.example.com:9/at/port"}),
    ],
)  # fmt: skip
def test_a_url_is_its_hosts_mirror(
    tmp_path: Path, repos: list[str], mirrors: list[str], urls: dict[str, str]
) -> None:
    result, names = read(tmp_path, *repos)
    assert (names, result.urls, result.faults) == (mirrors, urls, [])


def test_a_name_after_another_hosts_url_is_refused(tmp_path: Path) -> None:
    """It would be the configured upstream's, whose mirror the URL before it became."""
    result, names = read(tmp_path, "https://else.where/a/b", "a/b")
    assert names == ["a__b"]
    (fault,) = result.faults
    assert "else.where" in fault.reason
    assert "github.com" in fault.reason


def test_a_page_of_a_repository_is_none(tmp_path: Path) -> None:
    result, names = read(tmp_path, "a/b", "https://github.com/a/b/tree/main")
    assert (names, result.fault_count) == (["a__b"], 1)


@pytest.mark.parametrize("text", ["g/sub/p", "g+sub__p", "host.example/g/p", "h-80+g__p_q"])
def test_names_with_groups_have_one_spelling(text: str) -> None:
    name = MirrorName.parse(text)
    assert MirrorName.parse(str(name)) == name == MirrorName.parse(name.repo)
    assert (name.owner, name.name) == (name.path.replace("/", "+"), name.name)


@pytest.mark.root
@pytest.mark.slow
def test_two_forges_with_one_name_are_two_mirrors(
    make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """Each row is served from the host that it names."""
    tips = {}
    for forge in ("a", "b"):
        (tmp_path / forge / "o").mkdir(parents=True)
        upstream = Upstream(tmp_path / forge / "o/n")
        tips[forge] = upstream.commit({"who": forge})
        (tmp_path / forge / "o/n.git").symlink_to("n/.git")
    with serving(tmp_path / "a") as a, serving(tmp_path / "b") as b:
        config = (
            f'[checkouts]\nprewarm = false\n[upstream]\nurl = "{a.url}/{{owner}}/{{name}}.git"\n'
        )
        with daemon(config) as running:
            rows = [row(1, repo="o/n", base_commit=tips["a"], environment_setup_commit=...),
                    row(2, repo=f"{b.url}/o/n.git", base_commit=tips["b"],
                        environment_setup_commit=...)]  # fmt: skip
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(each) + "\n" for each in rows))
            command = [sys.executable, "-m", "mirrord", "--socket", str(running.socket)]
            done = subprocess.run(
                [*command, "dataset", "import", str(path)], capture_output=True, text=True,
                check=False, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            for number, forge in ((1, "a"), (2, "b")):
                made = running.json(
                    "POST", "/v1/checkouts", {"instance": f"psf__requests-{number}"}
                )
                assert (Path(made["path"]) / "who").read_text() == forge
            hosts = {it["name"]: it["host"] for it in running.json("GET", "/v1/mirrors")}
            host_b = b.url.removeprefix("http://")
            assert hosts == {
                "o__n": a.url.removeprefix("http://"),
                f"{host_b.replace(':', '-')}+o__n": host_b,
            }


def test_a_directory_of_upstreams_stands_for_github_and_no_other_host(tmp_path: Path) -> None:
    repos = ("https://github.com/a/b", "git@github.com:a/b.git", "a/b", "https://else.where/a/b")
    result, names = read(tmp_path, *repos, default=LOCAL)
    assert names == ["a__b", "a__b", "a__b", "else.where+a__b"]
    assert result.urls == {"else.where+a__b": "https://else.where/a/b"}
