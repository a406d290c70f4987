"""The commands of a build, and the box that they run in."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..places import ACTIVATE, ENVIRONMENT, SANDBOX_HOME
from ..presence import exists
from ..sandbox.box import Box

_UV = "/opt/uv/bin/uv"
_INDEX = "/opt/index"  # where a directory of packages is shown, which may be below the host's /tmp
_PYTHON = f"{ENVIRONMENT}/bin/python"
_PROGRAM, _INPUT = "/run/program.py", "/run/input"
_CACHE = f"{SANDBOX_HOME}/.cache"
# as old as conda's: later ones lack `setup.py develop` and `pkg_resources`
_SEEDS = ("pip<25.3", "setuptools<81", "wheel")
_CONFIGURATION = "/etc/uv/uv.toml"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # instead of those that uv and pip bring


@dataclass(frozen=True, kw_only=True)
class Order:
    """One build, with paths of the host. `scratch` has `home` and `tmp`.

    With `commands`, they run in `tree` with the finished `environment`. With `program`, which is
    Python, it runs there with a file of `input`. Without both, the
    environment is made, of the host's `interpreter` or of uv's managed Python of that version.
    """

    tree: str
    environment: str
    scratch: str
    uv: str
    cache: str
    python: str
    interpreter: str | None
    index: str
    network: bool
    index_date: str | None = None
    requirements: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    program: str = ""
    input: str = ""


@dataclass(frozen=True)
class _BuildStep:
    """A command of a build; a failure ends the build if it `must_succeed`."""

    title: str
    command: Sequence[str]
    must_succeed: bool = True


def steps_of(order: Order) -> Iterator[_BuildStep]:
    """Iterate over the commands of a build."""
    if order.program:
        # nothing of the tree, of variables or of path files is imported by its start
        yield _BuildStep("running a program", [_PYTHON, "-I", "-S", "-B", _PROGRAM, _INPUT])
        return
    if order.commands:
        for command in order.commands:
            # what uv refuses, such as an option in a file of requirements, pip may accept
            by_uv = f"{again} || " if (again := uv_command(command)) else ""
            script = f". {ACTIVATE}\n{by_uv}{command}"
            # pipefail: `make | tee log` is a failure where make fails
            yield _BuildStep(f"$ {command}", ["bash", "-o", "pipefail", "-c", script])
        return
    if order.interpreter:
        making = [_UV, "venv", "--no-project", "--allow-existing", "--python", order.interpreter]
        yield _BuildStep(f"making a venv of {order.interpreter}", [*making, ENVIRONMENT])
    else:
        # a managed Python can be moved: it becomes the prefix, which is all that a sandbox needs,
        # and environments share its files
        place = f"{SANDBOX_HOME}/python"
        fetching = [_UV, "python", "install", "--no-bin", "--install-dir", place, order.python]
        yield _BuildStep(f"fetching Python {order.python}", fetching)
        script = (
            f'for each in {place}/*; do [ -L "$each" ] || cp -a "$each/." {ENVIRONMENT} || exit;'
            f" done; rm -rf {place};"
            # uv's Pythons have this file, because of which pip refuses to install (PEP 668)
            f" find {ENVIRONMENT}/lib -name EXTERNALLY-MANAGED -delete;"
            f" [ -e {_PYTHON} ] || ln -s python3 {_PYTHON}"
        )
        yield _BuildStep("moving it to the prefix", ["bash", "-c", script])
    install = [_UV, "pip", "install", "--python", _PYTHON]
    # as with conda, the index date does not apply: environments of many dates share these
    seeding = ["env", "--unset=UV_EXCLUDE_NEWER", *install, *_SEEDS]
    yield _BuildStep("installing pip", seeding, must_succeed=False)
    for title, lines in (("requirements", order.requirements), ("packages", order.packages)):
        if lines:
            listed = "".join(f"{line}\n" for line in lines)
            script = f'printf %s "$1" >/tmp/{title}; shift; exec "$@" -r /tmp/{title}'
            yield _BuildStep(
                f"installing {title}", ["bash", "-c", script, "bash", listed, *install]
            )
    program = Path(__file__).with_name("compiling.py").read_text()
    compiling = [_PYTHON, "-c", program, f"{ENVIRONMENT}/lib", f"{_CACHE}/bytecode"]
    yield _BuildStep("compiling", compiling, must_succeed=False)


# those of pip and uv alike; --upgrade is not: pip leaves what the packages depend on as it is
_SHARED_OPTIONS = {"-e", "--editable", "-r", "--requirement", "--no-deps", "--no-build-isolation"}
_IGNORED_OPTIONS = {"-v", "-vv", "-vvv", "--verbose", "-q", "--quiet", "--no-cache-dir"}
_ARGUMENT = re.compile(r"[A-Za-z0-9./][\w.,=<>!~/\[\]-]*")


def uv_command(command: str) -> str | None:
    """Return a plain `pip install` as the same command of uv, which takes a fifth of the processor
    time; None if it is anything else.

    As with pip, a tree without pyproject.toml is installed by the environment's own setuptools.
    """
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words = [*lexer]
    except ValueError:
        return None
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    arguments = [word for word in words[2:] if word not in _IGNORED_OPTIONS]
    if words[:2] != ["pip", "install"] or not all(
        word in _SHARED_OPTIONS or _ARGUMENT.fullmatch(word) for word in arguments
    ):
        return None
    isolation = "$([ -e pyproject.toml ] || echo --no-build-isolation)"
    return f"{_UV} pip install --python {_PYTHON} {isolation} {shlex.join(arguments)}"


def box_of(order: Order) -> Box:
    """Return the box that the commands of a build run in."""
    if order.program:
        files = {_PROGRAM: order.program.encode(), _INPUT: order.input.encode()}
        tree, environment = Path(order.tree), Path(order.environment)
        return Box(
            tree=tree, environment=environment, is_environment_shared=True, files=files,
            names_paths=True,
        )  # fmt: skip
    directory = _directory_of(order.index)
    readable = {_UV: Path(order.uv), **({_INDEX: directory} if directory else {})}
    for path in ("/etc/uv", "/etc/pip.conf"):
        if exists(path):
            readable[path] = Path(path)
    scratch = Path(order.scratch)
    home = {SANDBOX_HOME: scratch / "home", _CACHE: Path(order.cache)}
    # the sandbox's /tmp, not the host's
    writable = {"/tmp": scratch / "tmp", **home}  # noqa: S108
    return Box(
        tree=Path(order.tree),
        environment=Path(order.environment),
        network=order.network,
        variables={**_variables(order, directory), **order.variables},
        readable=readable,
        writable=writable,
        names_paths=True,
    )


def _directory_of(index: str) -> Path | None:
    """Return the directory of an index that is a path or file URL."""
    path = index.removeprefix("file://")
    return Path(path) if path.startswith("/") else None


def _variables(order: Order, directory: Path | None) -> dict[str, str]:
    """Return the variables by which uv and pip find packages."""
    variables = {
        "UV_LINK_MODE": "copy",
        "UV_NO_PROGRESS": "1",
        # no command but `uv python install` fetches a Python
        "UV_PYTHON_DOWNLOADS": "manual",
        # uv's own Pythons are marked as managed from outside (PEP 668)
        "UV_BREAK_SYSTEM_PACKAGES": "1",
        "UV_CACHE_DIR": f"{_CACHE}/uv",
        # the tree may configure uv, too: pip does not read that
        "UV_NO_SOURCES": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # what two builds make should be equal bytes, and so one file: the order of a frozenset in
        # bytecode depends on the seed
        "PYTHONHASHSEED": "0",
        # 1980-01-01: a zip, and so a wheel, has no earlier date
        "SOURCE_DATE_EPOCH": "315532800",
    }
    if exists(_CONFIGURATION):
        variables["UV_CONFIG_FILE"] = _CONFIGURATION
    else:
        variables["UV_NO_CONFIG"] = "1"
    if exists(_CERTIFICATES):
        variables |= {"SSL_CERT_FILE": _CERTIFICATES, "PIP_CERT": _CERTIFICATES}
    if order.commands:  # importing a module must not change what they install
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    if not order.network:
        # pip would try five times more, with pauses
        variables |= {"UV_OFFLINE": "1", "PIP_RETRIES": "0"}
    if url := f"file://{_INDEX}" if directory else order.index:
        variables |= {"UV_DEFAULT_INDEX": url, "PIP_INDEX_URL": url}
    if directory:  # it may be a simple index, or a flat directory of archives
        variables |= {"UV_FIND_LINKS": _INDEX, "PIP_FIND_LINKS": _INDEX}
    if order.index_date and directory is None:  # files of a directory have no date
        variables |= {
            "UV_EXCLUDE_NEWER": order.index_date,
            "PIP_UPLOADED_PRIOR_TO": order.index_date,
        }
    return variables
