"""`hf://owner/name[@revision][?split=test&config=…]`: a dataset of the Hugging Face Hub.

huggingface_hub resolves the revision, downloads into its own cache and answers from there without a
network. The source is named by the commit that was resolved, so an import can be repeated. Token,
endpoint and cache are those of the library: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

import fnmatch
import glob
import re
import sys
from collections.abc import Mapping
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
from . import folders
from .opening import Source, open_file, with_origins

_FORM = "hf://owner/name[@revision][?split=test&config=…]"
_NAME = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+)(?:@(.+))?")
_ROWS = re.compile(r"\.(?:parquet|jsonl|ndjson|json|csv|tsv|arrow)(?:\.gz|\.zst)?$")
_NO_ROWS = {"dataset_infos.json", "dataset_dict.json", "state.json", "registry.json"}
_TASK = re.compile(r"(?:^|/)task\.(?:yaml|toml)$")
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
        found = _NAME.fullmatch(path)
        choice = dict(parse_qsl(query, keep_blank_values=True))
        unknown = choice.keys() - {"split", "config"}
        if found is None or unknown or not all(choice.values()):
            fact = f"{min(unknown)} is no parameter" if unknown else "it is not of the form"
            raise UsageError(f"cannot read {word}: {fact}", hint=f"write {_FORM}")
        return cls(found[1], found[2], choice.get("split"), choice.get("config"))

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
    """Download the files of one split, and read them in order.

    Raises UsageError, ResourceError where huggingface_hub is not installed, UpstreamError.
    """
    name = HubName.parse(word)
    hub = _Hub(name)
    folder = hub.download(["README.md", ".gitattributes"], name.revision)
    resolved = name._replace(revision=folder.name)
    known = hub.list_files(folder.name)
    files = _choose(resolved, known, _read_card(folder))
    if not files:
        tasks = [str(PurePosixPath(file).parent) for file in known if _TASK.search(file)]
        if not tasks:
            raise _unusable(resolved, "it has no files of rows and no tasks")
        hub.download([f"{glob.escape(task)}/*" for task in tasks], folder.name)
        cache = folder.parents[1].resolve()
        rows = partial(folders.iter_tasks, folder, links_within=cache)
        return Source(str(resolved), name.dataset, None, rows)
    hub.download([glob.escape(file) for file in files], folder.name)
    if len(files) == 1:
        return open_file(folder / files[0], str(resolved))._replace(name=name.dataset)
    opened = [open_file(folder / file, file) for file in files]
    return Source(str(resolved), name.dataset, None, partial(with_origins, opened))


# -- the library ----------------------------------------------------------------------------------


class _Hub:
    """huggingface_hub for one dataset, with its errors as ours."""

    def __init__(self, name: HubName) -> None:
        try:
            self._library = import_module("huggingface_hub")
            self._errors = import_module("huggingface_hub.errors")
        except ImportError as error:
            raise ResourceError(
                f"cannot download {name}: huggingface_hub is not installed",
                hint="install it with: pip install 'mirrord[hub]'",
            ) from error
        utils = import_module("huggingface_hub.utils")
        utils.logging.set_verbosity_error()
        if not sys.stderr.isatty():
            utils.disable_progress_bars()
        self._name = name

    def download(self, patterns: list[str], revision: str | None) -> Path:
        """Files of a revision; returns the folder of the snapshot, whose name is the commit."""
        found = self._call("snapshot_download", revision=revision, allow_patterns=patterns)
        return Path(found)

    def list_files(self, commit: str) -> list[str]:
        """All files of a commit of which some were downloaded."""
        return sorted(file.path for file in self._call("get_cached_repo_tree", revision=commit))

    def _call(self, function: str, **how: Any) -> Any:
        known = self._errors
        kind, hint = UpstreamError, "try again; what was downloaded is kept"
        try:
            return getattr(self._library, function)(self._name.repo, repo_type="dataset", **how)
        except known.GatedRepoError as error:
            kind, hint, cause = UpstreamAuthError, "accept its terms there, and set HF_TOKEN", error
        except known.RepositoryNotFoundError as error:
            hint = "check the name; a private dataset needs HF_TOKEN"
            kind, cause = UpstreamNotFoundError, error
        except known.RevisionNotFoundError as error:
            hint = "name a branch, a tag or a commit after @"
            kind, cause = UpstreamNotFoundError, error
        except (known.HTTPError, known.CachedRepoTreeNotFoundError, OSError) as error:
            cause = error
        fact = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise kind(f"cannot download {self._name}: {fact}", hint=hint) from cause


# -- which files are the rows ---------------------------------------------------------------------


def _read_card(folder: Path) -> dict[str, Any]:
    """The YAML at the head of README.md, in which most datasets say which files are which split."""
    card = folder / "README.md"
    text = card.read_text(errors="replace") if card.is_file() else ""
    head = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        value = yaml.safe_load(head[1]) if head else None
    except (ValueError, yaml.YAMLError):
        value = None
    return value if isinstance(value, dict) else {}


def _choose(name: HubName, known: list[str], card: Mapping[str, Any]) -> list[str]:
    """The files of the split, by the card, else by words in their paths; empty where none has rows.

    Raises UsageError where the choice is the user's.
    """
    listed = card.get("configs")
    configs = {
        str(each.get("config_name") or _DEFAULT): each
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict)
    }
    config: Mapping[str, Any] = {}
    if configs:
        marked = [key for key, each in configs.items() if each.get("default") is True]
        only = next(iter(configs)) if len(configs) == 1 else None
        named = name.config or next(iter(marked), only) or _DEFAULT
        config = configs[_one_of("config", named, name, list(configs))]
    elif name.config:
        known = [file for file in known if name.config in PurePosixPath(file).parts]
    splits = _listed_splits(config, known) or _splits_by_words(config, known)
    if not splits:
        return []
    only = next(iter(splits)) if len(splits) == 1 else None
    return splits[_one_of("split", name.split or only, name, list(splits))]


def _one_of(what: str, wanted: str | None, name: HubName, known: list[str]) -> str:
    if wanted in known:
        return wanted
    fact = f"there is no {wanted}" if getattr(name, what) else "it has several"
    hint = f"add {what}= with one of {', '.join(known)}"
    raise UsageError(f"cannot choose a {what} of {name}: {fact}", hint=hint)


def _listed_splits(config: Mapping[str, Any], known: list[str]) -> dict[str, list[str]]:
    """A config's `data_files`: paths by split, with patterns; paths alone are `train`."""
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
            str(path).removeprefix("./") for path in (paths if isinstance(paths, list) else [paths])
        ]
        found = [file for file in known if any(fnmatch.fnmatchcase(file, p) for p in patterns)]
        splits.setdefault(split, []).extend(found)
    return {split: files for split, files in splits.items() if files}


def _splits_by_words(config: Mapping[str, Any], known: list[str]) -> dict[str, list[str]]:
    """Files with rows below the config's `data_dir`, by the last word that is a split's.

    Of a split in several formats the one with the most files counts.
    """
    above = str(config.get("data_dir") or "").strip("./")
    splits: dict[str, dict[str, list[str]]] = {}
    for file in known:
        ending = _ROWS.search(file)
        if ending and PurePosixPath(file).name not in _NO_ROWS and file.startswith(above):
            words = [word for word in re.split(r"[^a-z0-9]+", file.lower()) if word in _SPLITS]
            formats = splits.setdefault(words[-1] if words else "train", {})
            formats.setdefault(ending[0], []).append(file)
    return {split: max(formats.values(), key=len) for split, formats in splits.items()}


def _unusable(name: HubName, fact: str) -> InvalidDatasetError:
    hint = "mirrord reads parquet, jsonl, json, csv and arrow files, and folders of tasks"
    return InvalidDatasetError(f"cannot import {shown(str(name))}: {fact}", hint=hint)
