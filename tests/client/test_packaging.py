"""The two distributions: the client alone, and the daemon that depends on it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import daemons
import installed
import pytest

import mirrord

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    built = installed.wheels(tmp_path_factory.mktemp("wheels"))
    return {re.sub(r"-\d.*", "", wheel.name): wheel for wheel in built}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """A fresh environment with the client's wheel and nothing else, made without any network."""
    made = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", str(made))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        f"--python={made}/bin/python",
        "install",
        "--no-index",
    ]
    _run(*pip, str(wheels["mirrord_client"]))
    return made


def _run(*command: str, cwd: Path | str = "/") -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_each_file_of_the_package_is_in_one_of_the_wheels(wheels: dict[str, Path]) -> None:
    """Two owners of one file would each remove it from under the other."""
    client, daemon = _files(wheels["mirrord_client"]), _files(wheels["mirrord"])
    ours = {
        str(path.relative_to(PROJECT))
        for path in (PROJECT / "mirrord").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    data = {f"mirrord/share/systemd/{path.name}" for path in (PROJECT / "systemd").iterdir()}
    assert client | daemon == ours | data | {"mirrord/share/config.toml"}
    assert not client & daemon
    assert wheels["mirrord_client"].stat().st_size < MOST_BYTES


def test_the_client_needs_no_other_package_and_the_daemon_the_same_version_of_it(
    wheels: dict[str, Path],
) -> None:
    """One version of both, in one place."""
    needs = {}
    for name, wheel in wheels.items():
        archive = zipfile.ZipFile(wheel)
        (metadata,) = [each for each in archive.namelist() if each.endswith("METADATA")]
        needs[name] = re.findall(
            r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE
        )
    assert [each for each in needs["mirrord_client"] if "extra ==" not in each] == []
    assert f"mirrord-client=={mirrord.__version__}" in needs["mirrord"]
    assert all(f"-{mirrord.__version__}-" in wheel.name for wheel in wheels.values())


def test_the_doctor_knows_both_as_installed(wheels: dict[str, Path], tmp_path: Path) -> None:
    """The client's distribution has no module of its name."""
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    code = "from mirrord import config; from mirrord.doctor import host; print(host.packages(config.Settings()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "('ok', 'all installed', '')\n"


def test_the_client_alone_talks_to_a_daemon(environment: Path) -> None:
    """Answers, errors, both colours; nothing that is not the standard library's is loaded."""
    script = textwrap.dedent("""
        import asyncio, sys
        from mirrord import AsyncClient, Client, InstanceNotFoundError, NotFoundError
        with Client(sys.argv[1]) as mirrord:
            assert mirrord.health().status == "ok"
            assert mirrord.status().mirrors == []
            try:
                mirrord.checkout("a__b-1")
            except InstanceNotFoundError as error:
                assert isinstance(error, NotFoundError) and error.hint
        async def main():
            async with AsyncClient(sys.argv[1]) as mirrord:
                return (await mirrord.health()).version
        print(asyncio.run(main()))
        tops = {name.partition(".")[0] for name in sys.modules}
        assert tops <= sys.stdlib_module_names | {"mirrord", "__main__", "sitecustomize"}, tops
    """)
    with daemons.daemon() as running:
        said = _run(
            f"{environment}/bin/python", "-I", "-W", "error", "-c", script, str(running.socket)
        )
    assert said.strip() == mirrord.__version__


def test_the_examples_of_the_documents_pass_strict_type_checks(
    environment: Path, tmp_path: Path
) -> None:
    """As a harness that installed the client would check them; and of the docstrings."""
    (tmp_path / "docstrings.py").write_text(_examples_of_docstrings())
    for document in ("README.md", "packaging/client/README.md"):
        examples = re.findall(r"```python\n(.*?)```", (PROJECT / document).read_text(), re.DOTALL)
        assert examples, document
        for number, example in enumerate(examples):
            head = "from pathlib import Path\ndef run_agent(path: Path) -> None: ...\n"
            (tmp_path / f"of_{len(document)}_{number}.py").write_text(head + example)
    examined = map(str, sorted(tmp_path.glob("*.py")))
    _run(sys.executable, *_mypy(environment), *examined, cwd=tmp_path)


_HANDLES = ("Client", "Checkout", "Grade", "Rehearsal", "Sandbox")


def _examples_of_docstrings() -> str:
    """Return the examples of exported classes and of the methods of handles, as functions; a
    handle is called as its class is.
    """
    lines = ["from mirrord import *"]
    for name in dir(mirrord):
        public = getattr(mirrord, name)
        texts = [inspect.cleandoc(vars(public)["__doc__"])] if isinstance(public, type) else []
        if name.removeprefix("Async") in _HANDLES:
            texts += [inspect.getdoc(member) or "" for member in vars(public).values()]
        examples = [
            example
            for text in texts
            for example in re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE)
        ]
        assert examples or name.removeprefix("Async") not in _HANDLES, name
        prefix = "Async" if name.startswith("Async") else ""
        given = [f"mirrord: {prefix}Client"]
        given += [f"{handle.lower()}: {prefix}{handle}" for handle in _HANDLES[1:]]
        for example in examples:
            start = f"{'async ' * bool(prefix)}def _({', '.join(given)}) -> None:"
            lines += [start, example]
    names = [name for name in dir(mirrord) if re.search(rf"\b{name}\b", "\n".join(lines))]
    imported = ["from pathlib import Path", f"from mirrord import {', '.join(names)}"]
    return "\n".join([*imported, *lines[1:]])


def test_the_public_names_explain_themselves() -> None:
    """All that `dir` lists is for those who import it, with a docstring of its own."""
    names = [name for name in dir(mirrord) if name != "__version__"]
    assert len(names) > 150
    for name in names:
        public = getattr(mirrord, name)
        text = vars(public)["__doc__"]
        assert text, name
        assert not text.startswith(f"{name}("), name  # what a dataclass is given
    for handle in _HANDLES:
        for prefix in ("", "Async"):
            for name, member in vars(getattr(mirrord, prefix + handle)).items():
                assert name.startswith("_") or inspect.getdoc(member), name


def test_the_public_names_have_types_for_those_who_import_them(
    environment: Path, tmp_path: Path
) -> None:
    """Clients, messages, choices, errors, from the top of the package; what is wrong is found."""
    (tmp_path / "right.py").write_text(
        textwrap.dedent("""
            from typing import assert_type
            from mirrord import AsyncClient, CheckoutBusyError, Client, History, MirrordError, Operation, Proof, View

            def one(client: Client) -> Operation:
                with client.checkout("a", view=View.GRADER, history=History.SQUASHED, ttl="1h") as checkout:
                    assert_type(checkout.reset(), Proof)
                    assert_type(checkout.diff(), bytes)
                return client.sync_mirror("a/b")

            async def two(client: AsyncClient) -> None:
                async with client.checkout("a") as checkout:
                    assert_type(await checkout.diff(), bytes)

            def three(error: MirrordError) -> str | None:
                return error.hint if isinstance(error, CheckoutBusyError) else None
        """)
    )
    (tmp_path / "wrong.py").write_text(
        "from mirrord import Client\nclient = Client()\nclient.checkout('a', view='grader')\nclient.health().mood\n"
    )
    done = subprocess.run(
        [sys.executable, *_mypy(environment), "right.py", "wrong.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    errors = [line.split(":")[:2] for line in done.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong.py", "3"], ["wrong.py", "4"]]


def _mypy(environment: Path) -> list[str]:
    python = f"--python-executable={environment}/bin/python"
    return ["-m", "mypy", "--strict", "--no-incremental", python]
