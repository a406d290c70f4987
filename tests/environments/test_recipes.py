"""Recipes: what they are made from, what is refused, and what names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import row

from mirrord.catalog import InstanceRow
from mirrord.datasets.formats import find_format
from mirrord.environments import specs
from mirrord.environments.lacks import lacks_of
from mirrord.environments.recipes import checked, digest_of, key_of, recipes_of_toml
from mirrord.environments.requirements import expanded
from mirrord.environments.specs import recipe_of
from mirrord.environments.steps import uv_command
from mirrord.errors import InvalidRecipeError, RecipeNotFoundError
from mirrord.grading.runners import files_of
from mirrord.protocol import Recipe

PROJECT = Path(__file__).parents[2]
REBENCH = {
    "python": "3.9",
    "packages": "requirements.txt",
    "reqs_path": ["requirements/base.txt"],
    "pip_packages": ["pytest", "responses==0.23"],
    "pre_install": ["apt-get update && apt-get install -y gcc libxml2-dev"],
    "install": "pip install -e .[dev]",
    "test_cmd": "pytest --no-header -rA",
    "log_parser": "parse_log_pytest",
    "env_vars": {"A": "1"},
    "no_use_env": None,
}
MAPPING = """
MAP_REPO_VERSION_TO_SPECS_PY = {"Own/Thing": {"1.0": {
    "python": "3.9", "packages": "mpmath 'numpy=1.19' conda-forge::scipy>=1.5", "install": "pip install -e .",
    "pip_packages": ["tox"], "eval_commands": ["export LANG=en_US.UTF-8", "locale-gen"], "test_cmd": "bin/test"}}}
MAP_REPO_TO_REQS_PATHS = {}
"""


def instance(**changes: Any) -> InstanceRow:
    given = row(**changes)
    row_format = find_format(None, [given])
    assert row_format is not None
    return row_format.read(given)


@pytest.fixture
def swebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that cannot be imported; the file of its mapping can be read."""
    place = tmp_path / "swebench" / "harness" / "constants"
    place.mkdir(parents=True)
    (tmp_path / "swebench" / "__init__.py").write_text("raise ImportError('no docker here')")
    (place / "python.py").write_text(MAPPING)
    monkeypatch.syspath_prepend(str(tmp_path))
    specs.swebench_specs.cache_clear()
    yield
    specs.swebench_specs.cache_clear()


def test_the_files_of_a_runner_are_in_its_command_and_in_its_recipe() -> None:
    """Options, variables and programs of the environment are no files of the tree."""
    config = {"python": "3.9", "test_cmd": "PYTHONWARNINGS=x bin/test -C --verbose"}
    sympy = recipe_of(instance(repo="sympy/sympy", version="1.0", install_config=config))
    assert files_of(sympy) == (
        "/sympy/testing/runtests.py", "/sympy/utilities/runtests.py", "/bin/test",
    )  # fmt: skip
    for command, files in {
        "./tests/runtests.py --verbosity 2": ("/tests/runtests.py",),
        "pytest -rA -p no:cacheprovider --rootdir=a/b": (),
        "cd x && python run.py; tox -e py39 -- ": ("/run.py",),
        "/usr/bin/env sh 'unfinished": (),
        "": (),
    }.items():
        assert files_of(Recipe(key="a", python="3.11", test_command=command)) == files


def test_a_row_of_swe_rebench_has_its_recipe() -> None:
    found = recipe_of(instance(install_config=REBENCH, version="2.27"))
    assert found == Recipe(
        key="psf__requests-2.27",
        python="3.9",
        requirements=["-r requirements/base.txt"],
        packages=["pytest", "responses==0.23"],
        install=["pip install -e .[dev]"],
        test_command="pytest --no-header -rA",
        variables={"A": "1"},
        log_parser="parse_log_pytest",
        host_packages=["gcc", "libxml2-dev"],
    )


def test_the_mapping_of_swebench_is_read_without_an_import_of_it(swebench: None) -> None:
    found = recipe_of(instance(repo="own/thing", version="1.0", created_at="2020-01-02T00:00:00Z"))
    assert found.packages == ["mpmath", "numpy==1.19.*", "scipy>=1.5", "tox"]
    assert (found.key, found.python) == ("own__thing-1.0", "3.9")
    assert (found.variables, found.test_command) == (
        {"LANG": "en_US.UTF-8"},
        "locale-gen; bin/test",
    )
    frozen = recipe_of(instance(repo="own/thing", version="1.0"), frozen=True)
    assert frozen.index_date == "2020-01-01T00:00:00+00:00"


def test_commands_that_set_a_shell_s_variables_are_one_script() -> None:
    config = {**REBENCH, "pre_install": ['URL="x"', "wget $URL"]}
    found = recipe_of(instance(install_config=config))
    assert found.pre_install == ['set -e\nURL="x"\nwget $URL']


def test_the_python_of_a_custom_row_is_enough_for_a_recipe() -> None:
    custom = instance(
        image_name="Lab/Requests:v2", python_version="3.11", environment_setup_commit=...
    )
    found = recipe_of(custom)
    assert (found.key, found.python) == ("lab-requests-v2", "3.11")
    assert found.packages == ["pytest"]
    assert found.install == ["python -m pip install -e ."]


def test_a_row_that_says_nothing_has_no_recipe() -> None:
    with pytest.raises(RecipeNotFoundError, match="psf__requests-1"):
        recipe_of(instance())
    with pytest.raises(InvalidRecipeError, match="'c:latest'"):
        recipe_of(instance(install_config={"base_image_name": "c:latest", "test_cmd": ["make"]}))


def test_nothing_of_the_answer_is_in_a_recipe() -> None:
    secret = {**REBENCH, "patch": "secret", "FAIL_TO_PASS": ["secret"], "notes": "secret"}
    given = instance(
        install_config=secret, patch="secret", test_patch="secret", FAIL_TO_PASS=["secret"]
    )
    assert "secret" not in str(recipe_of(given))


@pytest.mark.parametrize(
    ("image", "key"),
    [
        ("swebench/sweb.eval.x86_64.psf_1776_requests-1:latest", "psf__requests-2.3"),
        ("swerebench/sweb.eval.x86_64.psf__requests-1", "psf__requests-2.3"),
        ("jyangballin/swesmith.x86_64.own_1776_x.0f", "jyangballin-swesmith.x86_64.own_1776_x.0f"),
        (None, "psf__requests-2.3"),
    ],
)
def test_an_image_of_one_instance_names_no_environment(image: str | None, key: str) -> None:
    assert key_of(replace(instance(), environment=image, version="2.3")) == key


def test_a_long_name_is_cut_and_stays_another() -> None:
    keys = {key_of(replace(instance(), environment="x" * 300 + end)) for end in "ab"}
    assert len(keys) == 2
    assert all(len(key) < 120 for key in keys)


def test_equal_recipes_have_one_digest() -> None:
    one = Recipe(key="a", python="3.11", variables={"A": "1", "B": "2"})
    two = Recipe(variables={"B": "2", "A": "1"}, python="3.11", key="a")
    assert digest_of(one) == digest_of(two) != digest_of(Recipe(key="a", python="3.12"))


# -- files of the tree -----------------------------------------------------------------------------

TREE = {
    "requirements/dev.txt": "-r tests.txt\n-e .\n--index-url https://x\ntox  # a tool\n",
    "requirements/tests.txt": "pytest==7.3 \\\n    --hash=sha256:00\ntypes-pkg_resources==1\n-r ../../x",
    "environment.yml": "dependencies:\n- python=3.9\n- numpy=1.2=h1\n- pip:\n  - flit\n  - .[test]\n",
    "conda.yml": "dependencies:\n- hdf5\n",
}


def test_a_file_of_the_tree_becomes_its_packages() -> None:
    recipe = Recipe(key="a", python="3.11", requirements=["-r no.txt|requirements/dev.txt"])
    assert expanded(recipe, TREE.get).requirements == ["pytest==7.3", "types-setuptools", "tox"]
    conda = Recipe(key="a", python="3.11", requirements=["six", "-r environment.yml"])
    assert expanded(conda, TREE.get).requirements == ["six", "numpy==1.2", "flit"]


@pytest.mark.parametrize(
    ("line", "said"),
    [("-r no.txt", "no no.txt"), ("-r conda.yml", "'hdf5'"), ("-r requirements/tests.txt", None)],
)
def test_what_a_file_cannot_give_is_named(line: str, said: str | None) -> None:
    recipe = Recipe(key="a", python="3.11", requirements=[line])
    if said is None:
        expanded(recipe, TREE.get)
    else:
        with pytest.raises(InvalidRecipeError, match=said):
            expanded(recipe, TREE.get)


# -- TOML ------------------------------------------------------------------------------------------


def test_the_documented_recipe_is_read() -> None:
    text = (PROJECT / "docs" / "environments.md").read_text()
    [block] = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [found] = recipes_of_toml(block, "it")
    assert Recipe.__annotations__.keys() == {
        name for name, value in found.to_json().items() if value not in (None, [], {}, "")
    }
    documented = re.findall(r"^\| `(\w+)` \|", text.partition("\n## Builds")[0], re.MULTILINE)
    assert set(documented) == Recipe.__annotations__.keys()


def test_the_recipes_of_the_examples_are_read() -> None:
    for file in (PROJECT / "examples" / "environments").glob("*.toml"):
        recipes = recipes_of_toml(file.read_text(), file.name)
        assert {recipe.python for recipe in recipes} == {"3.11"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "not TOML"),
        ("[other]", "other"),
        ("[[environment]]\nkey = 'a'", "python: Field required"),
        ("[[environment]]\nkey = 'a'\npython = 3.11", "python: Input should be a string"),
        ("[[environment]]\nkey = 'a'\npython = '3.11'\npip = []", "unknown key pip"),
        ("[[environment]]\nkey = 'A b'\npython = '3.11'", "key has"),
        ("[[environment]]\nkey = 'a'\npython = '3.11'\n" * 2, "key a is used twice"),
    ],
)
def test_a_fault_of_a_file_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidRecipeError, match=re.escape(said)):
        recipes_of_toml(text, "it")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("key", "../a"),
        ("python", "2.7"),
        ("python", "3.11; rm"),
        ("index_date", "yesterday"),
        ("requirements", ["-r ../../etc/passwd"]),
        ("requirements", ["-r /etc/passwd"]),
        ("requirements", ["--index-url https://x"]),
        ("packages", ["a @ https://x/a.whl"]),
        ("packages", ["./local"]),
        ("packages", ["a\n-e b"]),
        ("install", [" "]),
        ("host_packages", ["-y"]),
        ("variables", {"A B": "1"}),
        ("log_parser", "magic"),
    ],
)
def test_what_no_recipe_can_have_is_refused(member: str, value: object) -> None:
    given = {"key": "a", "python": "3.11", member: value}
    with pytest.raises(InvalidRecipeError, match=member):
        checked(Recipe.from_json(given))


ISOLATION = "$([ -e pyproject.toml ] || echo --no-build-isolation)"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("python -m pip install -e .", "-e ."),
        ("pip install -v -e '.[test,dev]'", "-e '.[test,dev]'"),
        ('pip install "pytest<8" -r requirements/dev.txt', "'pytest<8' -r requirements/dev.txt"),
        ("python -m pip install --no-use-pep517 -e .", None),
        ("pip install -U pip", None),
        ("pip install pytest<8", None),
        ("pip install . && make", None),
        ("pip install $NAME", None),
        ("pip install git+https://example.com/r.git", None),
        ("pip install 'unfinished", None),
        ("make install", None),
    ],
)
def test_a_plain_pip_install_is_run_by_uv(command: str, arguments: str | None) -> None:
    expected = arguments and f"{ISOLATION} {arguments}"
    by_uv = uv_command(command)
    assert (by_uv and by_uv.partition("/bin/python ")[2]) == expected


@pytest.mark.parametrize(
    ("failure", "line", "name"),
    [
        ("fetching Python 3.8: status 2", "error: no download", "Python 3.11"),
        ("make: status 127", "bash: line 2: make: command not found", "make"),
        ("x", "/bin/sh: 1: swig: not found", "swig"),
        ("x", "error: command 'gcc' failed: No such file or directory", "gcc"),
        ("x", "a.c:3:10: fatal error: libxml/tree.h: No such file or directory", "libxml/tree.h"),
        ("x", "FileNotFoundError: [Errno 2] No such file or directory: 'dot'", "dot"),
        ("x", "FileNotFoundError: [Errno 2] No such file or directory: 'docs/a'", None),
        ("x", "error: no module named numpy", None),
    ],
)
def test_a_failed_build_says_what_the_host_lacks(failure: str, line: str, name: str | None) -> None:
    lacks = lacks_of(Recipe(key="k", python="3.11"), failure, ["before", line])
    assert [lack.name for lack in lacks] == ([name] if name else [])


def test_a_package_that_the_host_lacks_is_named() -> None:
    recipe = Recipe(key="k", python="3.11", host_packages=["bash", "no-such-package"])
    has_dpkg = Path("/var/lib/dpkg/info").is_dir()  # elsewhere it is unknown, and so not absent
    expected = ["no-such-package"] if has_dpkg else []
    assert [lack.name for lack in lacks_of(recipe, None, ())] == expected
