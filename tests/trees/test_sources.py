"""Trees copied from the layers of their template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gitrepos import Upstream
from trees import awkward, contents, tree_of, worktree

from mirrord.errors import ProofFailedError
from mirrord.git.objects.repository import Objects
from mirrord.templates import layers
from mirrord.trees.scan import hash_tree
from mirrord.trees.sources import LayerFiles
from mirrord.trees.tree import materialise

Template = tuple[LayerFiles, ...]


@pytest.fixture
def make_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Upstream, Sequence[str]], list[Template]]:
    """Build the templates of commits: each is a delta on the one before, whatever it costs."""

    def first_candidate(_objects: Objects, _tree: str, candidates: Any, _shared: Any) -> Any:
        return candidates[0] if candidates else ()

    def make(upstream: Upstream, commits: Sequence[str]) -> list[Template]:
        monkeypatch.setattr(layers, "_choose_base", first_candidate)
        trees, chain, templates = tmp_path / "trees", list[layers.Layer](), list[Template]()
        trees.mkdir()
        for commit in commits:
            candidates = [chain] if chain else []
            layer = layers.build_layer(
                upstream.path / ".git", commit, trees, tmp_path / "new", candidates
            )
            (tmp_path / "new").rename(trees / layer.name)
            chain = [layer, *chain]
            templates.append(
                tuple(LayerFiles(trees / each.name / "files", each.whiteouts) for each in chain)
            )
        return templates

    return make


def refuse(*_: object) -> bytes:
    raise AssertionError("an object was read")


@pytest.mark.root
@pytest.mark.parametrize("back", [False, True])
def test_a_copied_tree_is_gits(
    make_upstream: Callable[[str], Upstream],
    make_templates: Callable[..., list[Template]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    back: bool,
) -> None:
    """From one layer and from two, with kinds that turn into each other; no blob is read."""
    upstream = make_upstream("up")
    commits = awkward(upstream)[:: -1 if back else 1]
    templates = make_templates(upstream, commits)
    monkeypatch.setattr(Objects, "read_blob", refuse)
    for number, (commit, template) in enumerate(zip(commits, templates, strict=True)):
        assert len(template) == number + 1
        ours, theirs = tmp_path / f"ours{number}", tmp_path / f"gits{number}"
        manifest = materialise(
            upstream.path / ".git", commit, ours, owner=(12345, 12345), template=template
        )
        assert contents(ours) == contents(worktree(upstream, commit, theirs))
        assert hash_tree(ours, manifest) == tree_of(upstream, commit) == manifest.tree
        assert {entry.uid for entry in manifest.files.values()} == {12345}


@pytest.mark.parametrize("damage", ["bytes", "file", "layer", "kind"])
def test_a_damaged_template_is_not_copied(
    make_upstream: Callable[[str], Upstream],
    make_templates: Callable[..., list[Template]],
    tmp_path: Path,
    damage: str,
) -> None:
    upstream = make_upstream("up")
    commit = upstream.commit({"a/b": "one", "c": "two"})
    [template] = make_templates(upstream, [commit])
    victim = template[0].files / "a/b"
    if damage == "bytes":
        victim.write_text("eno")
    elif damage == "layer":
        template[0].files.with_name("manifest").unlink()
    else:
        victim.unlink()
        if damage == "kind":
            victim.symlink_to("/etc/passwd")
    with pytest.raises(ProofFailedError, match="template"):
        materialise(upstream.path / ".git", commit, tmp_path / "ours", template=template)
