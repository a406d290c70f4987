"""Open a dataset of the Hugging Face Hub: `hf://owner/name[@revision][?split=test&config=…]`.

huggingface_hub resolves the revision and downloads into its own cache, which also serves offline.
The source's label has the resolved commit, so an import can be repeated. HF_TOKEN, HF_ENDPOINT,
HF_HOME and HF_HUB_OFFLINE apply.
"""

import fnmatch
import glob
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import yaml

from ..errors import (
    InvalidDatasetError,
    ResourceError,
    UpstreamAuthError,
    UpstreamError,
    UpstreamNotFoundError,
    UsageError,
)
from ..model import shown
from ..places import how_to_get
from ..presence import is_file
from . import folders
from .opening import Source, open_file, with_origins

_FORM = "hf://owner/name[@revision][?split=test&config=…]"
_NAME = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(.+))?")
# what `datasets` writes beside rows, and Harbor's list of its data sets
_NO_ROWS = {"dataset_infos.json", "dataset_dict.json", "state.json", "registry.json"}
_TASK = re.compile(r"(?:^|/)task\.(?:yaml|toml)$")
# words by which `datasets` tells splits in names of files, too
_SPLITS = {"train", "validation", "valid", "val", "dev", "test", "eval"}
_DEFAULT = "default"


class HubName(NamedTuple):
    repo: str
    revision: str | None
    split: str | None
    config: str | None

    @classmethod
    def parse(cls, word: str) -> "HubName":
        """Raises UsageError."""
        path, _, query = word.removeprefix("hf://").partition("?")
        match = _NAME.fullmatch(path)
        choice = dict(parse_qsl(query, keep_blank_values=True))
        unknown = choice.keys() - {"split", "config"}
        if match is None or unknown or not all(choice.values()):
            fact = f"unknown parameter {min(unknown)}" if unknown else "invalid syntax"
            raise UsageError(f"cannot read {word}: {fact}", hint=f"write {_FORM}")
        return cls(match[1], match[2], choice.get("split"), choice.get("config"))

    def __str__(self) -> str:
        chosen = {"config": self.config, "split": self.split}
        query = urlencode({key: value for key, value in chosen.items() if value})
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{revision}" + (f"?{query}" if query else "")

    @property
    def dataset(self) -> str:
        parts = (self.repo.partition("/")[2], self.config, self.split)
        return "-".join(part for part in parts if part)


def open_dataset(word: str) -> Source:
    """Download the files of one split and open them in order.

    Raises UsageError, UpstreamError, or ResourceError without huggingface_hub.
    """
    name = HubName.parse(word)
    hub = _Hub(name)
    folder = hub.download(["README.md", ".gitattributes"], name.revision)
    resolved = name._replace(revision=folder.name)
    all_files = hub.list_files(folder.name)
    files = _choose(resolved, all_files, _read_card(folder))
    if not files:
        tasks = [str(PurePosixPath(file).parent) for file in all_files if _TASK.search(file)]
        if not tasks:
            raise _unusable(resolved, "it has no files of rows and no tasks")
        hub.download([f"{glob.escape(task)}/*" for task in tasks], folder.name)
        # a snapshot's files are links to ../../blobs
        cache = folder.parents[1].resolve()
        rows = partial(folders.iter_tasks, folder, links_within=cache)
        return Source(str(resolved), name.dataset, None, rows)
    # what may be downloaded is given as patterns, and a name may have brackets
    hub.download([glob.escape(file) for file in files], folder.name)
    if len(files) == 1:
        return open_file(folder / files[0], str(resolved))._replace(name=name.dataset)
    opened = [open_file(folder / file, file) for file in files]
    return Source(str(resolved), name.dataset, None, partial(with_origins, opened))


# -- the library ----------------------------------------------------------------------------------


class _Hub:
    """huggingface_hub for one dataset. Translates its errors."""

    def __init__(self, name: HubName) -> None:
        try:
            self._library = import_module("huggingface_hub")
            self._errors = import_module("huggingface_hub.errors")
        except ImportError as error:
            raise ResourceError(
                f"cannot download {name}: huggingface_hub is not installed",
                hint=how_to_get("hub"),
            ) from error
        utils = import_module("huggingface_hub.utils")
        utils.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            utils.disable_progress_bars()
        self._name = name

    def download(self, patterns: list[str], revision: str | None) -> Path:
        """Download files of a revision. Return the snapshot's folder, named by the commit."""
        directory = self._call("snapshot_download", revision=revision, allow_patterns=patterns)
        return Path(directory)

    def list_files(self, commit: str) -> list[str]:
        """List all files of a commit from which files were downloaded."""
        return sorted(file.path for file in self._call("get_cached_repo_tree", revision=commit))

    def _call(self, function: str, **options: Any) -> Any:
        errors = self._errors
        kind, hint = UpstreamError, "try again; downloaded files are kept"
        try:
            return getattr(self._library, function)(self._name.repo, repo_type="dataset", **options)
        except errors.GatedRepoError as error:
            hint = "accept its terms on the Hub, and set HF_TOKEN"
            kind, cause = UpstreamAuthError, error
        except errors.RepositoryNotFoundError as error:
            hint = "check the name; a private dataset needs HF_TOKEN"
            kind, cause = UpstreamNotFoundError, error
        except errors.RevisionNotFoundError as error:
            hint = "name a branch, a tag or a commit after @"
            kind, cause = UpstreamNotFoundError, error
        except (errors.HTTPError, errors.CachedRepoTreeNotFoundError, OSError) as error:
            cause = error
        fact = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise kind(f"cannot download {self._name}: {fact}", hint=hint) from cause


# -- the files of a split -------------------------------------------------------------------------


def _read_card(folder: Path) -> dict[str, Any]:
    """Read the YAML at the head of README.md, in which most datasets list the files by split."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if is_file(card) else ""
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        value = yaml.safe_load(head[1]) if head else None
    except (ValueError, yaml.YAMLError):
        value = None
    return value if isinstance(value, dict) else {}


def _choose(name: HubName, files: list[str], card: Mapping[str, Any]) -> list[str]:
    """Return the files of the split, by the card or by words in paths; empty if none has rows.

    Raises UsageError if the user has to choose.
    """
    listed = card.get("configs")
    configs = {
        str(entry.get("config_name") or _DEFAULT): entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict)
    }
    config: Mapping[str, Any] = {}
    if configs:
        defaults = [key for key, entry in configs.items() if entry.get("default") is True]
        only = next(iter(configs)) if len(configs) == 1 else None
        wanted = name.config or next(iter(defaults), only) or _DEFAULT
        config = configs[_one_of("config", wanted, name, list(configs))]
    elif name.config:
        files = [file for file in files if name.config in PurePosixPath(file).parts]
    splits = _listed_splits(config, files) or _splits_by_words(config, files)
    if not splits:
        return []
    only = next(iter(splits)) if len(splits) == 1 else None
    return splits[_one_of("split", name.split or only, name, list(splits))]


def _one_of(what: str, wanted: str | None, name: HubName, choices: list[str]) -> str:
    if wanted in choices:
        return wanted
    fact = f"there is no {wanted}" if getattr(name, what) else "it has several"
    hint = f"add {what}= with one of {', '.join(choices)}"
    raise UsageError(f"cannot choose a {what} of {name}: {fact}", hint=hint)


def _listed_splits(config: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """Return the files of a config's `data_files`, by split; without a split they are `train`."""
    match config.get("data_files"):
        case dict() as by_split:
            listed = [(str(split), paths) for split, paths in by_split.items()]
        case [{**_first}, *_rest] as entries:
            listed = [(str(e.get("split", "train")), e.get("path")) for e in entries]
        case str() | list() as paths:
            listed = [("train", paths)]
        case _:
            return {}
    splits: dict[str, list[str]] = {}
    for split, paths in listed:
        patterns = [
            str(path).removeprefix("./").split("/")
            for path in (paths if isinstance(paths, list) else [paths])
        ]
        named = [file for file in files if any(_matches(file.split("/"), p) for p in patterns)]
        splits.setdefault(split, []).extend(named)
    return {split: named for split, named in splits.items() if named}


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match as the Hub does: `*` stays within a name, `**` stands for any number of directories."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[start:], pattern[1:]) for start in range(len(path) + 1))
    is_same = bool(path) and fnmatch.fnmatchcase(path[0], pattern[0])
    return is_same and _matches(path[1:], pattern[1:])


_ROWS = re.compile(r"\.(?:parquet|jsonl|ndjson|json|csv|tsv|arrow)(?:\.gz|\.zst)?$")


def _splits_by_words(config: Mapping[str, Any], files: list[str]) -> dict[str, list[str]]:
    """Return files of rows below the config's `data_dir`, by the last split name in their path.

    Of several formats of a split the one with most files is taken.
    """
    above = str(config.get("data_dir") or "").strip("./")
    splits: dict[str, dict[str, list[str]]] = {}
    for file in files:
        ending = _ROWS.search(file)
        path = PurePosixPath(file)
        if ending and path.name not in _NO_ROWS and path.is_relative_to(above):
            words = [word for word in re.split(r"[^a-z0-9]+", file.lower()) if word in _SPLITS]
            formats = splits.setdefault(words[-1] if words else "train", {})
            formats.setdefault(ending[0], []).append(file)
    return {split: max(formats.values(), key=len) for split, formats in splits.items()}


def _unusable(name: HubName, fact: str) -> InvalidDatasetError:
    hint = "mirrord reads parquet, jsonl, json, csv and arrow files, and folders of tasks"
    return InvalidDatasetError(f"cannot import {shown(str(name))}: {fact}", hint=hint)
