"""The documents name existing error codes, formats, modules and links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mirrord.api.request  # declares an error of its own
from mirrord.datasets.fields import STANDARD, parse_mapping
from mirrord.datasets.formats import find_format, format_infos
from mirrord.errors import MirrordError, iter_errors

PROJECT = Path(__file__).parents[2]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])


def rows_of(document: str, columns: int) -> list[list[str]]:
    """Return the cells of all rows of a document's tables with this number of columns."""
    lines = (PROJECT / "docs" / document).read_text().splitlines()
    tables = (
        [cell.strip() for cell in line[1:-1].split(" | ")] for line in lines if line[:1] == "|"
    )
    return [cells for cells in tables if len(cells) == columns]


def test_every_error_code_is_documented_with_its_statuses() -> None:
    assert mirrord.api.request.MethodNotAllowedError in set(iter_errors(MirrordError))
    documented = {
        (cells[0].strip("`"), int(cells[1]), int(cells[2]))
        for cells in rows_of("errors.md", 5)
        if cells[1].isdigit()
    }
    known = {(each.code, each.http_status, each.exit_status) for each in iter_errors(MirrordError)}
    assert documented == known


def test_every_format_is_documented() -> None:
    documented = {cells[0].strip("`"): cells[1] for cells in rows_of("formats.md", 3)[1:]}
    assert {info.name: info.title for info in format_infos()} == documented


def test_the_documented_mapping_reads_the_documented_row() -> None:
    text = (PROJECT / "docs" / "formats.md").read_text()
    blocks = dict(re.findall(r"^```(toml|json)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    row_format = find_format(parse_mapping(blocks["toml"]), [])
    assert row_format is not None
    found = row_format.read(json.loads(blocks["json"]))
    assert (found.id, found.repo) == ("psf__requests-2317", "psf/requests")
    assert [role for _, role in found.commits] == ["base", "gold"]
    assert found.fail_to_pass == ("test_requests.py::test_a",)
    assert (found.environment, found.python_version) == ("registry/psf.requests", "3.12")


def test_every_field_of_a_row_is_documented() -> None:
    documented = {
        name for cells in rows_of("formats.md", 2) for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert set(STANDARD.sources) <= documented


def test_pages_are_few_and_short() -> None:
    """A screen or five each; 40 with the six of the site that are made from the program."""
    sizes = {path.name: path.stat().st_size for path in (PROJECT / "docs").rglob("*.md")}
    assert {name: size for name, size in sizes.items() if size > 15_000} == {}
    assert len(sizes) <= 34


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """To a file, and to a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_and_files_that_are_named_exist(document: Path) -> None:
    """`a/b.py`, and `a/{b,c}.py` for several; below mirrord/ or the project."""
    if document.name == "CHANGELOG.md":  # it names what is gone
        return
    for name in re.findall(r"`([\w./{},-]+\.(?:py|md|toml|lock|svg))`", document.read_text()):
        braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
        names = (
            [name] if not braces else [f"{braces[1]}{n}{braces[3]}" for n in braces[2].split(",")]
        )
        for each in names:
            places = (PROJECT / each, PROJECT / "mirrord" / each, PROJECT / "docs" / each)
            assert any(place.exists() for place in places) or "/" not in each, each
