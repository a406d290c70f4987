"""Records of what was prepared for commits, beside each environment; by mirror and commit."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..checkouts.prepared import PreparedLayers, layer_name
from ..host.files import read_plain
from ..protocol import Preparation
from ..templates.environments import EnvironmentStore

_FILE = "preparations.json"


@dataclass(frozen=True)
class Preparations:
    """The preparations of one store's environments, whose layers `layers` has."""

    store: EnvironmentStore
    layers: PreparedLayers

    def read(self, digest: str) -> dict[str, dict[str, Any]]:
        """Return what is recorded of an environment, by MIRROR@COMMIT."""
        with suppress(FileNotFoundError, ValueError):
            return dict(json.loads(read_plain(self.store.root / digest / _FILE)))
        return {}

    def write(self, digest: str, key: str, preparation: dict[str, Any]) -> None:
        written = json.dumps({**self.read(digest), key: preparation})
        path = self.store.root / digest / _FILE
        new = path.with_suffix(".new")  # a kill leaves the whole old record, not half of one
        new.write_text(written)
        new.rename(path)

    def list(self, digest: str) -> list[Preparation]:
        """Return the commits with a prepared layer, and those whose preparation failed."""
        recorded, name = self.read(digest), layer_name(digest)
        ready = [layer for layer in self.layers.all() if layer.saved.name == name]
        preparations = []
        for key in dict.fromkeys(
            [*(f"{layer.mirror}@{layer.commit}" for layer in ready), *recorded]
        ):
            entry = recorded.get(key, {})
            if any(f"{layer.mirror}@{layer.commit}" == key for layer in ready):
                entry = {"layer": name, "findings": entry.get("findings", [])}
            mirror, _, commit = key.partition("@")
            named = {part: entry[part] for part in ("layer", "error", "findings") if part in entry}
            preparations.append(Preparation(mirror=mirror, commit=commit, **named))
        return preparations
