"""Build the site of the documents in dist/site: `make site`.

The pages are those of docs/ and of the project's root. The command line, the API and the
configuration are made from the program. A link that leads nowhere ends the build.
"""

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mirrord.api.table import ENDPOINTS, openapi_document
from mirrord.cli.commands import build
from mirrord.cli.table import EXIT_STATUSES, VERBS

PROJECT = Path(__file__).parents[2]
PAGES = PROJECT / "build" / "site"
# Files of the root that are one page, with the headings that links lead to.
ROOT_FILES = {
    "CONTRIBUTING.md": "project.md#contributing",
    "SECURITY.md": "project.md#reporting-a-vulnerability",
    "CHANGELOG.md": "project.md#changes",
    "config.toml": "configuration.md",
    "README.md": "index.md",
}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(PROJECT / "docs", PAGES)
    for page in PAGES.rglob("*.md"):
        page.write_text(_with_links_of_the_site(page.read_text()))
    pages = {
        "index.md": _with_links_of_the_site((PROJECT / "README.md").read_text()),
        "project.md": _project(),
        "examples.md": _examples(),
        "configuration.md": _configuration(),
        "command-line.md": "\n".join(_command_line()),
        "api.md": "\n".join(_api()),
    }
    for name, text in pages.items():
        (PAGES / name).write_text(text)
    mkdocs = PROJECT / ".venv/site/bin/mkdocs"
    settings = Path(__file__).with_name("mkdocs.yml")
    command = [mkdocs, "--quiet", "build", "--strict", "--clean", "--config-file", settings]
    sys.exit(subprocess.run(command, check=False).returncode)


def _with_links_of_the_site(text: str) -> str:
    """Links as pages of the site have them: docs/ is its root."""
    text = re.sub(r"\]\((?:\.\./)*docs/", "](", text)
    text = re.sub(r"\]\((?:\.\./)*examples/([\w./-]+)\)", _link_of_example, text)
    for file, target in ROOT_FILES.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(file)}(?:#[\w-]*)?\)", f"]({target})", text)
    # A file of the source that is no page: its name.
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+[^)]+\)", r"\1", text)


def _link_of_example(match: re.Match[str]) -> str:
    return f"](examples.md#{_slug(match[1])})"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _project() -> str:
    parts = (
        ("Reporting a vulnerability", "SECURITY.md"),
        ("Contributing", "CONTRIBUTING.md"),
        ("Changes", "CHANGELOG.md"),
    )
    texts = ["# The project\n"]
    for title, file in parts:
        _, _, body = (PROJECT / file).read_text().partition("\n")
        texts.append(f"## {title}\n{_deeper(body)}")
    return _with_links_of_the_site("\n".join(texts))


def _deeper(text: str) -> str:
    """Headings a level down; comments in blocks of code stay as they are."""
    blocks = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block if block.startswith("```") else re.sub(r"^#", "##", block, flags=re.MULTILINE)
        for block in blocks
    )


def _examples() -> str:
    texts = ["# Examples\n\nWhole programs; the tests run them.\n"]
    languages = {".py": "python", ".sh": "sh", ".toml": "toml", ".jq": "jq"}
    for file in sorted((PROJECT / "examples").rglob("*.*")):
        name = file.relative_to(PROJECT / "examples")
        texts.append(f"## {name}\n\n```{languages[file.suffix]}\n{file.read_text()}```\n")
    return "\n".join(texts)


def _configuration() -> str:
    text = (PROJECT / "config.toml").read_text()
    return f"# Configuration\n\nEvery key with its default.\n\n```toml\n{text}```\n"


def _command_line() -> Iterator[str]:
    """Each verb with its example, arguments, options and exit statuses."""
    root = build()
    context = click.Context(root, info_name="mirrord")
    yield "# Command line\n\n`mirrord VERB --help` says the same.\n"
    for section in dict.fromkeys(verb.section for verb in VERBS):
        yield f"## {section}\n"
        for verb in (verb for verb in VERBS if verb.section == section):
            yield from _verb(root, context, verb.name, verb.example, verb.ends)
    yield "## Exit statuses\n\n| status | meaning |\n|---|---|"
    yield from (f"| {status} | {meaning} |" for status, meaning in EXIT_STATUSES.items())


def _verb(
    root: click.Group, context: click.Context, name: str, example: str, ends: tuple[int, ...]
) -> Iterator[str]:
    command: click.Command = root
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"### mirrord {name}\n\n```sh\nmirrord {name} {usage}\n```\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "").replace("<", "&lt;") + "\n"
    if example:
        yield f"Example: `mirrord {example}`\n"
    records = [param.get_help_record(context) for param in command.get_params(context)]
    if shown := [record for record in records if record and "--help" not in record[0]]:
        yield "| option | |\n|---|---|"
        yield from (f"| `{option}` | {_cell(text)} |" for option, text in shown)
        yield ""
    if ends:
        yield f"Exit status: {', '.join(map(str, (0, 1, 2, *ends)))}.\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _api() -> Iterator[str]:
    """Each request with its parameters, and the members of what it takes and answers."""
    document = json.loads(openapi_document(ENDPOINTS))
    yield "# HTTP API\n\n`GET /v1/openapi.json` answers all of it, for programs.\n"
    yield "## Requests\n"
    for path, methods in document["paths"].items():
        for method, request in methods.items():
            yield from _request(f"{method.upper()} {path}", request)
    yield "## Objects\n"
    for name, schema in document["components"]["schemas"].items():
        yield from _object(name, schema)


def _request(title: str, request: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}\n\n{request['summary']}.\n"
    if parameters := request.get("parameters"):
        yield "| parameter | in | type |\n|---|---|---|"
        for parameter in parameters:
            kind = _type(parameter["schema"])
            yield f"| `{parameter['name']}` | {parameter['in']} | {kind} |"
        yield ""
    if body := _content(request.get("requestBody", {})):
        yield f"Takes {body}.\n"
    for status, response in request["responses"].items():
        if status.startswith("2") and (body := _content(response)):
            yield f"Answers {status}: {body}.\n"


def _content(body: dict[str, Any]) -> str:
    return ", ".join(
        f"{_type(content.get('schema', {}))} (`{kind}`)"
        for kind, content in body.get("content", {}).items()
    )


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if description := schema.get("description"):
        yield f"{description}\n"
    if members := schema.get("properties"):
        required = schema.get("required", ())
        yield "| member | type | |\n|---|---|---|"
        for member, kind in members.items():
            note = "required" if member in required else ""
            text = ". ".join(filter(None, (note, kind.get("description", ""))))
            yield f"| `{member}` | {_type(kind)} | {_cell(text)} |"
        yield ""


def _type(schema: dict[str, Any]) -> str:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{_slug(name)})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, choices))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if values := schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    kinds = schema.get("type", "anything")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


if __name__ == "__main__":
    main()
