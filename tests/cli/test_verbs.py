"""The command line without a daemon: its table of verbs, its options, how it fails, and what needs none."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from canned import CHECKOUT, CHECKOUT_ROUTES, LEASE, OPERATION
from gitrepos import Upstream
from httpserver import serving
from verbs import ARGUMENTS, NEEDS_NO_DAEMON
from waiting import BOUND_S, until

from mirrord import errors
from mirrord.cli.commands import build
from mirrord.cli.main import run
from mirrord.cli.session import Session
from mirrord.cli.table import EXIT_STATUSES, GROUPS, LOOP, SECTIONS, VERBS, Verb

DESIGNED = [
    "serve",
    "status",
    "mirror-add",
    "mirror-list",
    "mirror-show",
    "mirror-set-url",
    "mirror-sync",
    "mirror-remove",
    "credential-check",
    "dataset-import",
    "dataset-list",
    "dataset-show",
    "dataset-remove",
    "dataset-formats",
    "dataset-derive",
    "audit",
    "heal",
    "checkout",
    "reset",
    "fork",
    "attach",
    "enter",
    "environment-build",
    "environment-import",
    "environment-list",
    "environment-log",
    "environment-remove",
    "environment-show",
    "diff",
    "apply",
    "restore",
    "release",
    "renew",
    "checkouts",
    "grade",
    "receipt",
    "verify-seal",
    "rehearse",
    "dataset-diff",
    "dataset-export",
    "instance-show",
    "du",
    "gc",
    "doctor",
    "events",
    "bundle-create",
    "bundle-import",
    "config-check",
    "config-show",
    "service-install",
    "service-uninstall",
    "exec",
    "completion",
    "config-reload",
    "mirror-restore",
    *(f"pin-{verb}" for verb in ("add", "list", "remove")),
    *(f"snapshot-{verb}" for verb in ("create", "list", "remove")),
    *(f"layer-{verb}" for verb in ("save", "list", "remove")),
    *(f"ref-{verb}" for verb in ("log", "diff", "restore")),
    *(f"operation-{verb}" for verb in ("list", "show", "wait", "cancel")),
]


@pytest.fixture(autouse=True)
def _no_daemon_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MIRRORD_CONFIG", raising=False)
    monkeypatch.setenv("MIRRORD_SOCKET", str(tmp_path / "none"))


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mirrord", *words]


@pytest.fixture
def lone_process() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes a test started, ended whatever happened."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_verbs_are_those_of_the_design() -> None:
    """Its section 7, one instance, and the service of a host or of a user."""
    assert sorted(verb.name.replace(" ", "-") for verb in VERBS) == sorted(DESIGNED)
    assert {verb.name.split()[0] for verb in VERBS if " " in verb.name} == set(GROUPS)


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    """One table for people, one for programs: the same."""
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.MirrordError)
    ]
    assert {each.exit_status for each in classes} | {0} == set(EXIT_STATUSES)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_explains_itself_and_its_exit_statuses(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the shared options."""
    assert run([*verb.name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert verb.summary in text
    assert all(option in text for option in ("--json", "--config", "--socket"))
    assert all(f"{status}  {EXIT_STATUSES[status]}" in text for status in (0, 1, 2, *verb.ends))
    assert not re.search(r"\w[.,]? {2,}\w", re.split("\nOptions|\nPositional arguments", text)[0])


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_help_of_a_verb_begins_with_an_example_that_can_be_typed(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its words are parsed as they are when the verb runs."""
    run([*verb.name.split(), "--help"])
    assert capsys.readouterr().out.startswith(f"Example: mirrord {verb.example}\n")
    assert f"{verb.example} ".startswith(f"{verb.name} ")
    _parse(verb.example)


def _parse(example: str) -> None:
    """Parse a command line as a shell and mirrord do, and run nothing."""
    words = shlex.split(example.partition(" >")[0])
    command: click.Command = build()
    context = command.make_context("mirrord", list(words), obj=Session())
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None
        command = found
        context = command.make_context(name, words, parent=context)


def test_the_help_has_a_session_and_then_four_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines[:5]] == [f"mirrord {words}" for words, _ in LOOP]
    assert [line[:-1] for line in lines if line[:-1] in SECTIONS] == [
        "Use",
        "Data",
        "Operate",
        "Rare",
    ]
    assert all(len(line) <= 80 for line in lines)
    for words, _ in LOOP:
        _parse(words)
    for name in {verb.name.split()[0] for verb in VERBS}:
        assert len(re.findall(rf"^  {name} +[A-Z]", text, re.MULTILINE)) == 1, name
    assert len({verb.name.split()[0] for verb in VERBS}) <= 60


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rm", "mirrord release"),
        ("ls", "mirrord checkouts"),
        ("list", "mirrord checkouts"),
        ("fetch", "mirrord mirror sync"),
        ("ps", "mirrord checkouts"),
        ("run", "mirrord exec"),
        ("top", "mirrord status"),
        ("chekout", "mirrord checkout"),
        ("pins", "mirrord pin"),
        ("mirror rm a/b", "mirrord mirror remove"),
        ("dataset ls", "mirrord dataset list"),
        ("operation kill", "mirrord operation cancel"),
        ("snapshot creat", "mirrord snapshot create"),
    ],
)
def test_a_verb_that_is_not_there_is_answered_with_the_one_that_is_meant(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == 2
    told = capsys.readouterr().err
    assert f"hint: did you mean `{expected}`" in told, told
    assert run([*words.split(), "--json"]) == 2
    assert expected in json.loads(capsys.readouterr().err)["hint"]


def test_a_verb_that_nothing_is_like_is_answered_with_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["xyzzy"]) == 2
    assert "hint: see `mirrord --help`" in capsys.readouterr().err


def test_no_verb_of_before_is_left() -> None:
    names = {verb.name for verb in VERBS}
    for old in (
        "unpin",
        "pins",
        "save",
        "layers",
        "snapshots",
        "fleet",
        "reload",
        "refs",
        "operations",
        "top",
        "support-bundle",
    ):
        assert not any(name.split()[0] == old for name in names)
    for option in ("--concurrency", "--remove"):
        assert option not in {flag for verb in VERBS for flag in _flags(verb)}


def _flags(verb: Verb) -> list[str]:
    return [flag for parameter in _parameters(verb) for flag in parameter.opts]


def _parameters(verb: Verb) -> list[click.Parameter]:
    context = click.Context(build())
    command: click.Command = build()
    for name in verb.name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None
        command = found
    command.make_context(verb.name, [], resilient_parsing=True)
    return command.params


def test_an_option_means_one_thing_by_one_word() -> None:
    """Options of the same value have the same name wherever they are."""
    helps: dict[str, set[str]] = {}
    for verb in VERBS:
        for flag in _flags(verb):
            helps.setdefault(flag, set()).add(verb.name)
    assert {"grade", "rehearse"} <= helps["--jobs"]
    assert {"checkout", "grade", "exec", "rehearse"} <= helps["--owner"]
    assert helps["--from"] == {"fork"}
    assert helps["--to"] == {"reset"}


# what a parameter of such a metavar names, unless its verb's group says it
_COMPLETED = {
    "ID": "checkout", "INSTANCE": "instance", "KEY": "environment", "FILE": "file",
    "PATCH": "file", "--dataset": "dataset",
}  # fmt: skip
_OF_GROUPS = {
    "operation": {"ID": "operation"},
    "events": {"ID": ""},  # of an event
    "layer remove": {"ID": "layer"},
    "environment import": {"KEY": ""},  # a new one
    **{
        group: {"NAME": "mirror"}
        for group in ("mirror", "ref", "pin", "audit", "heal", "layer list", "bundle")
    },
    **{f"dataset {verb}": {"NAME": "dataset"} for verb in ("show", "export", "remove")},
}


def test_what_the_daemon_or_the_shell_knows_is_completed() -> None:
    """A parameter of several kinds completes one of them."""
    for verb in VERBS:
        table = dict(_COMPLETED)
        for group, own in _OF_GROUPS.items():
            table |= own if f"{verb.name} ".startswith(f"{group} ") else {}
        for parameter in _parameters(verb):
            if not parameter.expose_value or parameter.opts[0] in {"--mirror", "--name"}:
                continue
            words = re.findall(r"[A-Z]+", str(parameter.metavar)) + parameter.opts
            complete = getattr(parameter._custom_shell_complete, "args", [""])[0]
            if kinds := {table[word] for word in words if table.get(word)}:
                assert set(complete.split(" or ")) & kinds, (verb.name, parameter.opts, kinds)


_LOADED = "import sys\nfrom mirrord.cli.main import run\nrun(sys.argv[1:])\nprint(*sys.modules, file=sys.stderr)"
_HEAVY = {
    "typer", "rich", "pygments", "structlog", "sqlalchemy", "pygit2", "pyarrow", "uvicorn", "starlette",
    "asyncio", "anyio", "pydantic", "httpx", "ssl", "http.client", "subprocess", "tempfile", "logging.config", "toml",
    "mirrord.config", "mirrord.git", "mirrord.api", "mirrord.host", "mirrord.client._async",
}  # fmt: skip
EXEC_MODULES_MAX = 39
ID = str(LEASE["id"])
STATUS = {
    "version": "0.1.0",
    "pid": 1,
    "uid": 0,
    "started_at": "2026-01-01T00:00:00Z",
    "state_dir": "/var/lib/mirrord",
    "config_path": None,
    "backend": "overlay",
    "health": {"status": "ok", "version": "0.1.0"},
    "mirrors": [],
    "datasets": [],
    "checkout_count": 0,
    "checkout_max": 1024,
    "operations_running": 0,
}


def _modules(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOADED, *words], capture_output=True, check=True
    )
    return set(done.stderr.decode().split())


def test_help_needs_none_of_the_heavy_libraries() -> None:
    """Nor does completion, which runs at every press of the key."""
    assert not _modules("--help") & (
        _HEAVY | {"pydantic", "anyio", "asyncio", "mirrord.config", "mirrord.client"}
    )


def test_exec_imports_little_before_it_asks_the_daemon() -> None:
    """Imports are nearly all of its processor time: each module of ours takes about 1 ms."""
    code = (
        "import sys, mirrord.cli.main, mirrord.cli.verbs.execute, mirrord.client._sync.client\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    others = {
        "hashlib",
        "tomllib",
        "concurrent.futures",
        "logging",
        "tarfile",
        "mirrord.testlogs",
        "xml.etree.ElementTree",
        "ctypes",
    }
    assert not loaded & (others | _HEAVY - {"subprocess", "tempfile"})
    ours = {name for name in loaded if name.partition(".")[0] == "mirrord"}
    assert len(ours) <= EXEC_MODULES_MAX, sorted(ours)


@pytest.mark.parametrize(
    "words",
    [
        *(["status"], ["checkouts"], ["checkout", "i"]),
        *([verb, ID] for verb in ("reset", "release", "diff", "grade")),
    ],
    ids=lambda words: words[0],
)
def test_a_verb_loads_what_it_needs(words: list[str], path: Path) -> None:
    """Half of its time was imports."""
    routes = {
        **CHECKOUT_ROUTES,
        ("GET", "/v1/checkouts"): lambda h: h.answer([]),
        ("GET", "/v1/status"): lambda h: h.answer(STATUS),
        ("POST", f"/v1/checkouts/{ID}/grade"): lambda h: h.answer({**LEASE, "changed": 1}),
    }
    with serving(path, routes) as server:
        assert not _modules(*words, "--socket", str(path)) & _HEAVY
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [("mirrord mir", "mirror"), ("mirrord mirror a", "add"), ("mirrord reset --js", "--json")],
)
def test_the_shell_completes_verbs_and_options(words: str, expected: str) -> None:
    """As bash asks."""
    environment = {
        **os.environ,
        "_MIRRORD_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(_command(), capture_output=True, text=True, check=False, env=environment)
    assert f"plain,{expected}" in done.stdout.split()


def test_the_shell_completes_what_the_daemon_knows(path: Path) -> None:
    """As bash asks: mirrors, instances, checkouts; none without a daemon. Files are the shell's."""
    routes = {
        ("GET", "/v1/instances"): lambda h: h.answer(
            [{"id": "psf__requests-1"}, {"id": "other-2"}]
        ),
        ("GET", "/v1/checkouts"): lambda h: h.answer([LEASE]),
        ("GET", "/v1/mirrors"): lambda h: h.answer([_MIRROR]),
    }

    def complete(words: str) -> list[str]:
        environment = {**os.environ, "_MIRRORD_COMPLETE": "bash_complete", "COMP_WORDS": words}
        environment["COMP_CWORD"] = str(len(words.split()) - 1)
        done = subprocess.run(_command(), capture_output=True, text=True, env=environment)
        return done.stdout.split()

    with serving(path, routes):
        at = f"mirrord --socket {path}"
        assert complete(f"{at} checkout psf") == ["plain,psf__requests-1"]
        assert complete(f"{at} diff a") == [f"plain,{ID}"]
        assert complete(f"{at} exec p") == ["plain,psf__requests-1"]
        assert complete(f"{at} mirror show psf/") == ["plain,psf/requests"]
        assert complete(f"{at} dataset import ver") == ["file,ver"]
    assert complete(f"{at} checkout psf") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_MIRRORD_COMPLETE" in capfd.readouterr().out
    assert run(["completion", "csh"]) == 2


_MIRROR = {
    "name": "psf__requests",
    "repo": "psf/requests",
    "url": "u",
    "host": "local",
    "state": "ready",
}
_DATASET = {
    "name": "verified", "format": "swebench", "source": "s", "sha256": "0", "imported_at": "2026-01-01T00:00:00Z",
    "instance_count": 1, "commit_count": 1, "mirrors": [], "fault_count": 0, "unpinned_count": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words", "route", "names", "expected"),
    [
        (
            "instance-not-found", ["checkout", "psf__request-1"],
            ("POST", "/v1/checkouts"), ("GET", "/v1/instances", [{"id": "psf__requests-1"}]), "psf__requests-1",
        ),
        (
            "checkout-not-found", ["diff", ID[:-1] + "b"],
            ("GET", f"/v1/checkouts/{ID[:-1]}b/diff"), ("GET", "/v1/checkouts", [LEASE]), ID,
        ),
        (
            "not-found", ["dataset", "show", "verifed"],
            ("GET", "/v1/datasets/verifed"), ("GET", "/v1/datasets", [_DATASET]), "verified",
        ),
        (
            "mirror-not-found", ["mirror", "sync", "psf/request"],
            ("POST", "/v1/mirrors/psf__request/sync"), ("GET", "/v1/mirrors", [_MIRROR]), "psf__requests",
        ),
        (
            "mirror-not-found", ["mirror", "show", "psf/request"],
            ("GET", "/v1/mirrors/psf__request"), ("GET", "/v1/mirrors", [_MIRROR]), "psf__requests",
        ),
    ],
)  # fmt: skip
def test_a_mistyped_name_is_answered_with_the_one_that_is_meant(
    code: str, words: list[str], route: tuple[str, str], names: tuple[str, str, Any], expected: str,
    path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    problem = {
        "status": 404,
        "code": code,
        "kind": words[0],
        "detail": "cannot find it: no such name",
        "hint": "h",
    }
    routes = {
        route: lambda h: h.answer(problem, 404, "application/problem+json"),
        names[:2]: lambda h: h.answer(names[2]),
    }
    with serving(path, routes):
        assert run([*words, "--socket", str(path)]) == 4
    assert f"hint: did you mean {expected!r}?" in capsys.readouterr().err


# -- how it fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb.name not in NEEDS_NO_DAEMON], ids=lambda verb: verb.name
)
def test_every_verb_without_a_daemon_ends_with_nine(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, a sentence and a hint on stderr."""
    assert run([*verb.name.split(), *ARGUMENTS.get(verb.name, [])]) == 9
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "mirrord: cannot reach the daemon" in shown.err
    assert "hint: start it" in shown.err


@pytest.mark.parametrize(
    "words",
    [
        ["bogus"],
        [],
        ["checkout"],
        ["checkout", "i", "--histroy", "sealed"],
        ["checkout", "i", "--history", "all"],
        ["mirror"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Told on stderr."""
    assert run(words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--json", "bogus"],
        ["checkout", "i", "--histroy", "sealed", "--json"],
        ["checkout", "--json"],
        ["mirror", "--json"],
        ["checkout", "i", "--ttl", "soon", "--json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_as_json_is_a_problem_like_any_other(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One object on stderr, wherever --json stands."""
    assert run(words) == 2
    shown = capsys.readouterr()
    problem = json.loads(shown.err)
    assert (shown.out, problem["status"]) == ("", 400)
    assert problem["detail"].startswith("cannot ")
    assert problem["hint"]


def test_json_of_another_command_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Behind `--` is what `exec` runs."""
    assert run(["exec", "--histroy", "i", "--", "jq", "--json"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("ttl", ["soon", "0", "-1s", "5"])
def test_a_ttl_that_is_no_duration_is_wrong_usage(
    ttl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the daemon is asked."""
    assert run(["checkout", "i", f"--ttl={ttl}"]) == 2
    assert "--ttl 2h" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["release", "reset", "diff", "renew", "grade", "receipt"])
def test_an_empty_name_of_a_checkout_is_wrong_usage(verb: str) -> None:
    """An unset variable of a script is not the checkout around the current directory."""
    assert run([verb, ""]) == 2


def test_an_error_as_json_is_a_problem_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """stdout holds answers only."""
    assert run(["status", "--json"]) == 9
    shown = capsys.readouterr()
    assert (shown.out, json.loads(shown.err)["code"]) == ("", "no-daemon")


def test_a_bug_is_told_in_short_and_with_debug_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1."""
    monkeypatch.setattr("mirrord.cli.session.Session.client", property(lambda self: 1 // 0))
    assert run(["status"]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert run(["status", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert run(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["code"] == "internal"


@pytest.mark.parametrize(
    "args",
    [
        ["verify-seal", "PATH", "--base", "a" * 40],
        ["verify-seal", ".", "--base", "a" * 40, "--mirror", "PATH"],
        ["dataset", "import", "PATH"],
        ["dataset", "derive", "PATH"],
        ["bundle", "import", "PATH"],
        ["bundle", "create", "psf/requests", "PATH/file"],
        ["heal", "psf/requests", "--bundle", "PATH"],
        ["grade", "--predictions", "PATH"],
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_used_is_no_bug(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may use every directory; a name of 300 bytes is refused to root as well."""
    assert run([word.replace("PATH", "n" * 300) for word in args]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_bundle_is_not_made_for_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No daemon is asked: a mirror of gigabytes would be bundled before it fails."""
    assert run(["bundle", "create", "psf/requests", str(tmp_path)]) == 2
    assert "it is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["loop", "n" * 300, "loop/checkouts"])
def test_a_checkout_at_no_usable_path_is_not_found(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No daemon is asked: no part of the path is an id."""
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    assert run(["diff", path]) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_checkout_of_another_user_is_not_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mirrord", "diff", str(tmp_path / "private" / "tree")],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"},
        user=65534,
        group=65534,
        extra_groups=(),
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "no held checkout" in done.stderr) == (4, True), done.stderr


def test_an_answer_that_finds_no_room_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # Python flushes again at exit
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mirrord", "config", "show", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert (done.returncode, json.loads(done.stderr)["code"]) == (7, "disk-full")


def test_a_reader_that_hangs_up_is_no_traceback() -> None:
    """`mirrord … | head`."""
    done = subprocess.run(
        f"{sys.executable} -m mirrord config show | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_ctrl_c_while_modules_load_is_no_traceback(
    tmp_path: Path, lone_process: list[subprocess.Popen[bytes]]
) -> None:
    """The module that loads first, and that of a verb, wait until they are interrupted."""
    wait = "import os, time\nopen(os.environ['LOADING'], 'w').close()\ntime.sleep(60)\n"
    for name, words in (("click", ["--version"]), ("difflib", ["xyzzy"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.py").write_text(wait)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.getcwd()}",
            "LOADING": str(folder / "loading"),
        }
        process = subprocess.Popen(_command(*words), stderr=subprocess.PIPE, env=environment)
        lone_process.append(process)
        until((folder / "loading").exists)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=BOUND_S)
        assert (process.returncode in (130, -signal.SIGINT), told) == (True, b"")


def test_a_quiet_verb_prints_its_answer_alone(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors are printed all the same."""
    routes = {
        ("POST", "/v1/reload"): lambda h: h.answer(
            {"applied": ["sync.jitter"], "refused": ["socket"]}
        )
    }
    with serving(path, routes):
        for option, told in ((["-q"], ""), ([], "socket needs a restart\n")):
            assert run([*option, "config", "reload", "--socket", str(path)]) == 0
            assert capfd.readouterr() == ("sync.jitter\n", told)
    assert run(["-q", "config", "reload", "--socket", str(path)]) == 9
    assert "cannot reach the daemon" in capfd.readouterr().err


def test_ctrl_c_ends_with_130(path: Path, lone_process: list[subprocess.Popen[bytes]]) -> None:
    """Without a traceback."""
    ended = threading.Event()

    def hang(_: object) -> None:
        ended.wait(BOUND_S)

    with serving(path, {("GET", "/v1/status"): hang}) as server:
        process = subprocess.Popen(
            _command("--socket", str(path), "status"),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        lone_process.append(process)
        until(lambda: server.seen)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=BOUND_S)
        ended.set()
    assert (process.returncode, told) == (130, b"")


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after", "between", "environment", "config"])
def test_the_daemon_is_chosen_before_or_after_the_verb(
    order: str,
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Or by the environment, or by the configuration."""
    config = tmp_path / "config.toml"
    config.write_text(f'socket = "{path}"\n')
    if order == "environment":
        monkeypatch.setenv("MIRRORD_SOCKET", str(path))
    socket = ["--socket", str(path)]
    words = {
        "before": [*socket, "--json", "dataset", "list"],
        "after": ["dataset", "list", *socket, "--json"],
        "between": ["dataset", "--json", *socket, "list"],
        "environment": ["dataset", "list", "--json"],
        "config": ["dataset", "list", "--json", "--config", str(config)],
    }[order]
    with serving(path, {("GET", "/v1/datasets"): lambda h: h.answer([])}):
        assert run(words) == 0
    assert json.loads(capsys.readouterr().out) == []


# -- verbs against a scripted daemon ----------------------------------------------------------------------------------


def test_checkout_prints_the_path_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For `cd $(mirrord checkout …)`."""
    with serving(path, CHECKOUT_ROUTES):
        assert run(["checkout", "psf__requests-1", "--socket", str(path), "--ttl", "90s"]) == 0
        assert capsys.readouterr().out == f"{LEASE['path']}\n"


def test_diff_prints_the_bytes_of_the_patch(
    path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Not all patches are UTF-8."""
    with serving(path, CHECKOUT_ROUTES):
        assert run(["diff", str(LEASE["id"]), "--socket", str(path)]) == 0
    assert capfdbinary.readouterr().out == b"diff \xff\n"


def test_reset_takes_an_instance_else_a_commit(path: Path) -> None:
    """What is no instance is looked for in the mirror."""
    bodies: list[Any] = []

    def reset(handler: Any) -> None:
        bodies.append(json.loads(handler.server.seen[-1].body))
        if "instance" in bodies[-1]:
            handler.problem(404, "instance-not-found")
        else:
            CHECKOUT_ROUTES["POST", f"{CHECKOUT}/reset"](handler)

    with serving(path, {("POST", f"{CHECKOUT}/reset"): reset}):
        assert run(["reset", str(LEASE["id"]), "v1.0", "--socket", str(path)]) == 0
        assert run(["reset", str(LEASE["id"]), "c" * 40, "--socket", str(path)]) == 0
    assert bodies == [{"instance": "v1.0"}, {"commit": "v1.0"}, {"commit": "c" * 40}]


def test_a_checkout_may_be_named_by_a_path_inside_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` above all; the daemon says whether the path is a checkout's."""
    tree = path.parent / "checkouts" / str(LEASE["id"]) / "tree"
    (tree / "src").mkdir(parents=True)
    monkeypatch.chdir(tree / "src")
    routes: Any = {
        **CHECKOUT_ROUTES,
        ("GET", CHECKOUT): lambda h: h.answer({**LEASE, "path": str(tree)}),
    }
    with serving(path, routes) as server:
        assert run(["release", ".", "--socket", str(path)]) == 0
        assert server.asked == [("GET", CHECKOUT), ("DELETE", CHECKOUT)]
        assert run(["release", "..", str(tree.parent), "--socket", str(path)]) == 4


def test_whoever_stood_in_the_tree_before_a_reset_stands_in_the_one_after(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The shell still knows where that is; Linux says that there is no such directory any more."""
    tree = tmp_path / str(LEASE["id"]) / "tree"
    tree.mkdir(parents=True)
    monkeypatch.chdir(tree)
    monkeypatch.setenv("PWD", str(tree))
    tree.rmdir()
    tree.mkdir()
    identity = f"/v1/checkouts/{LEASE['id']}"
    routes: Any = {
        ("GET", identity): lambda h: h.answer({**LEASE, "path": str(tree)}),
        ("DELETE", identity): lambda h: h.answer(b"", 204),
    }
    with serving(path, routes) as server:
        assert run(["release", ".", "--socket", str(path)]) == 0
    assert [request.path for request in server.seen] == [identity, identity]


def test_release_goes_on_behind_one_that_fails(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends with the first failure's status."""
    with serving(path, CHECKOUT_ROUTES) as server:
        assert run(["release", "b" * 16, str(LEASE["id"]), "--socket", str(path)]) == 4
    assert len(server.seen) == 2
    assert "not-found" in capsys.readouterr().err


def test_apply_reads_standard_input(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `git apply -` does."""
    with serving(path, CHECKOUT_ROUTES) as server:
        subprocess.run(
            _command("apply", str(LEASE["id"]), "-", "--socket", str(path)),
            input=b"p\xff",
            check=True,
            capture_output=True,
        )
    assert server.seen[0].body == b"p\xff"


def test_apply_says_on_stderr_what_made_a_patch_fit(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing where that was git's own way; in --json always."""
    (tmp_path / "p").write_bytes(b"p")
    command = ["apply", str(LEASE["id"]), str(tmp_path / "p"), "--socket", str(path)]
    with serving(path, CHECKOUT_ROUTES):
        assert run(command) == 0
        assert capsys.readouterr().err == ""
        assert run([*command, "--strategy", "tolerant"]) == 0
        said = capsys.readouterr()
        assert (said.out, said.err) == (f"{LEASE['path']}\n", "applied by strategy crlf\n")
        assert run([*command, "--strategy", "tolerant", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["strategy"] == "crlf"
        assert run([*command, "--strategy", "sloppy"]) == 2


def test_no_wait_answers_with_the_operation(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And asks nothing further."""
    with serving(path, {("POST", "/v1/mirrors"): lambda h: h.answer(OPERATION, 202)}) as server:
        assert (
            run(["mirror", "add", "psf/requests", "--no-wait", "--json", "--socket", str(path)])
            == 0
        )
    assert json.loads(capsys.readouterr().out)[0]["id"] == "op1"
    assert len(server.seen) == 1


def test_an_audit_with_unservable_instances_ends_with_eight(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per finding, then a total, whatever a name in it holds; what was done about it is on stderr."""
    finding = {
        "mirror": "a__b",
        "kind": "missing",
        "commit": "c" * 40,
        "state": "missing",
        "instances": ["i"],
        "detail": "gone\nup\x1b[2Jstream",
    }
    audit = {
        "id": "au1",
        "level": "closure",
        "mirrors": ["a__b"],
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:00:01Z",
        "counts": {"ok": 2, "missing": 1},
        "pinned": {"ok": 1},
        "findings": [finding],
        "affected": ["i"],
        "open_count": 1,
        "repairs": [
            {
                "mirror": "a__b",
                "objects": {"upstream": 2},
                "unhealed": ["d" * 40],
                "unhealed_count": 1,
            }
        ],
    }
    routes: Any = {
        ("POST", "/v1/audits"): lambda h: h.answer(OPERATION, 202),
        ("GET", "/v1/operations/op1"): lambda h: h.answer(
            {**OPERATION, "state": "done", "result": {"id": "au1"}}
        ),
        ("GET", "/v1/audits/au1"): lambda h: h.answer(audit),
    }
    with serving(path, routes):
        assert run(["audit", "--socket", str(path)]) == 8
    shown = capsys.readouterr()
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == [
        "a__b healed",
        "a__b not healed",
    ]
    assert shown.out.splitlines() == [
        f"a__b {'c' * 40} missing (i): gone\\nup\\x1b[2Jstream",
        "3 recorded commits and 1 only pinned in 1 mirror at level closure: 3 ok, 1 missing; 1 instance cannot be served; 1 finding",
    ]


# -- exec -------------------------------------------------------------------------------------------------------------


SOCKET = ("--keep-access", "--socket")
"""Without a sandbox, which tests/cli/test_exec_access.py has."""


@pytest.fixture
def leased(path: Path) -> Iterator[Any]:
    """A scripted daemon whose checkout is a real directory."""
    tree = path.parent / "tree"
    tree.mkdir()
    lease = {**LEASE, "path": str(tree)}
    with serving(
        path, {**CHECKOUT_ROUTES, ("POST", "/v1/checkouts"): lambda h: h.answer(lease, 201)}
    ) as server:
        yield server


@pytest.mark.root
def test_exec_runs_in_the_checkout_and_ends_as_the_command(
    leased: Any, path: Path, tmp_path: Path
) -> None:
    """With the patch left behind and the checkout released."""
    script = 'test "$(pwd)" = "$1" && test "$MIRRORD_CHECKOUT" = "$2" && exit 42'
    words = ["sh", "-c", script, "sh", str(path.parent / "tree"), str(LEASE["id"])]
    done = subprocess.run(
        _command("exec", "i", *SOCKET, str(path), "--diff", str(tmp_path / "p"), "--", *words),
        check=False,
    )
    assert done.returncode == 42
    assert (tmp_path / "p").read_bytes() == b"diff \xff\n"
    assert leased.asked[-1] == ("DELETE", CHECKOUT)


@pytest.mark.root
@pytest.mark.parametrize(
    "between", [[], ["--"], ["--view", "grader"], ["--view=grader", "--network"]], ids=" ".join
)
def test_exec_takes_a_command_without_dashes_before_it(
    between: list[str], leased: Any, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own options stay its own, and -- in it too."""
    words = ["sh", "-c", 'echo "$@"; exit 3', "sh", "--json", "-q", "--", "x"]
    assert run(["exec", *SOCKET, str(path), "i", *between, *words]) == 3
    assert capfd.readouterr().out == "--json -q -- x\n"


@pytest.mark.root
def test_exec_without_a_command_runs_a_shell(leased: Any, path: Path) -> None:
    """It reads what is typed."""
    done = subprocess.run(
        _command("exec", "i", *SOCKET, str(path)),
        input="echo at $MIRRORD_CHECKOUT; exit 5\n",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (5, f"at {LEASE['id']}\n")


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_exec_forwards_signals_and_releases(
    number: signal.Signals, leased: Any, path: Path, lone_process: list[subprocess.Popen[bytes]]
) -> None:
    """The command's end decides, as a shell would tell it."""
    ready = path.parent / "ready"
    process = subprocess.Popen(
        _command(
            "exec", "i", *SOCKET, str(path), "--", "sh", "-c", f"touch {ready}; exec sleep 30"
        ),
        stdin=subprocess.DEVNULL,
    )
    lone_process.append(process)
    until(ready.exists)
    time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(BOUND_S) == 128 + number
    assert leased.asked[-1] == ("DELETE", CHECKOUT)


@pytest.mark.root
def test_exec_of_a_command_that_does_not_exist_releases(
    leased: Any, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not found, as a shell tells it."""
    assert run(["exec", "i", *SOCKET, str(path), "--", "no-such-command-here"]) == 127
    assert leased.asked[-1] == ("DELETE", CHECKOUT)


def test_exec_finds_out_early_that_the_patch_has_no_place(path: Path) -> None:
    """Before the command has run for hours."""
    assert run(["exec", "i", "--socket", str(path), "--diff", "/no/such/place", "--", "true"]) == 2


# -- what needs no daemon ---------------------------------------------------------------------------------------------


def test_config_check_tells_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2."""
    file = tmp_path / "config.toml"
    file.write_text('[sync]\ninterval = "often"\nconcurency = 2\n')
    assert run(["config", "check", str(file)]) == 2
    told = capsys.readouterr().err
    assert "2 faults" in told
    assert "did you mean sync.concurrency" in told
    assert run(["config", "check", "--config", str(file)]) == 2


def test_config_show_prints_a_configuration_that_means_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults included."""
    file, again = tmp_path / "config.toml", tmp_path / "again.toml"
    file.write_text(
        '[upstream]\nfallbacks = ["file:///x/{name}"]\n[[mirror]]\nrepo = "psf/requests"\n[access]\nadmins = ["root", "daemon"]\n'
        '[grading.policies]\ntests = "drop"\n[[grading.rule]]\nname = "a"\npaths = ["x", "y/**"]\n'
    )
    assert run(["config", "show", "--config", str(file)]) == 0
    again.write_text(capsys.readouterr().out)
    assert run(["config", "show", "--config", str(again), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert run(["--json", "config", "show", "--config", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == shown
    assert (shown["sync"]["interval"], shown["mirror"][0]["repo"]) == ("6h", "psf/requests")
    assert shown["grading"]["policies"] == {"tests": "drop"}
    assert shown["grading"]["rule"] == [{"name": "a", "paths": ["x", "y/**"], "policy": None}]


def test_config_show_masks_the_secrets_of_urls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what people paste into reports."""
    file = tmp_path / "config.toml"
    file.write_text('[[mirror]]\nrepo = "a/b"\nurl = "https://me:hunter2@example.com/b.git"\n')
    for words in (["config", "show"], ["config", "show", "--json"], ["config", "check", "--json"]):
        assert run([*words, "--config", str(file)]) == 0
        assert "hunter2" not in capsys.readouterr().out


def test_serve_refuses_a_bad_configuration_with_every_fault(tmp_path: Path) -> None:
    """It has become the daemon by then, whose exit status is ours."""
    file = tmp_path / "config.toml"
    file.write_text('[sync]\ninterval = "often"\nconcurency = 2\n')
    done = subprocess.run(
        _command("serve", "--config", str(file)), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "2 faults" in done.stderr


def test_verify_seal_finds_what_lies_behind_the_commit(
    make_upstream: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 8 for a repository with later commits, 0 for one that ends there."""
    upstream: Upstream = make_upstream("u")
    first, last = upstream.history(2)
    assert run(["verify-seal", str(upstream.path), "--base", first, "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["sealed"] is False
    assert run(["verify-seal", str(upstream.path / "no"), "--base", last]) == 4
    assert run(["verify-seal", str(upstream.path), "--base", "main"]) == 2


def test_verify_seal_judges_a_directory_against_a_mirror(
    make_upstream: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 8 for content of a later commit, 0 without, 2 where it is not told which mirror."""
    upstream: Upstream = make_upstream("u")
    first, last = upstream.history(2)
    root, words = tmp_path / "root", ["--mirror", str(upstream.path / ".git"), "--base"]
    root.mkdir()
    (root / "later.py").write_bytes((upstream.path / "src/mod1.py").read_bytes())
    assert run(["verify-seal", "--root", str(root), *words, first]) == 8
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"future-file: later.py: has the content of src/mod1.py of {last}"
    assert lines[-1] == "leaks (1 leak): 1 file of 200 B, no repository"
    assert run(["verify-seal", "--root", str(root), *words, last, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file_count"] == 1
    assert run(["verify-seal", "--root", str(root), "--base", first]) == 2
    assert run(["verify-seal", str(root), "--root", str(root), *words, first]) == 2
    assert run(["verify-seal", "--root", str(root), *words, "1" * 40]) == 4


def test_the_command_line_is_built_once_per_call_and_in_order() -> None:
    """The order of the table is the order of the help."""
    top = list(dict.fromkeys(verb.name.split()[0] for verb in VERBS))
    assert list(build().commands) == top


def test_status_is_a_glance(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of many mirrors those with a problem, of many problems the first; `--all` shows everything."""
    problem = {"type": "about:blank", "title": "t", "status": 502, "code": "upstream-failed"}
    bad = {"error": {**problem, "detail": "cannot sync"}, "state": "failed"}
    mirrors = [
        {
            "name": f"o__r{number}", "repo": f"o/r{number}", "url": "u", "host": "local", "state": "ready",
            **(bad if number % 100 == 7 else {}),
        }
        for number in range(2000)
    ]  # fmt: skip
    jobs = [{"name": f"sync/o__r{number}"} for number in range(2000)]
    answer = {**STATUS, "mirrors": mirrors, "jobs": jobs}
    with serving(path, {("GET", "/v1/status"): lambda h: h.answer(answer)}):
        assert run(["status", "--socket", str(path)]) == 0
        glance = capsys.readouterr().out.splitlines()
        assert run(["status", "--all", "--socket", str(path)]) == 0
        everything = capsys.readouterr().out.splitlines()
    assert len(glance) < 30
    assert any("20 failed, 1,980 ready" in line for line in glance)
    assert next(line.split()[0] for line in glance if line.startswith("o__r")) == "o__r7"
    assert "… and 10 more: mirrord status --all" in glance
    assert len(everything) > 4000


def test_remarks_and_errors_send_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """They quote rows, names and hints that come from outside."""
    session = Session()
    session.note("row\x1b[2J\nnext")
    session.fail(errors.UsageError("fact\x1b[2J", hint="remedy\x1b[2J"))
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert told.splitlines() == [
        "row\\x1b[2J",
        "next",
        "mirrord: fact\\x1b[2J",
        "hint: remedy\\x1b[2J",
    ]
