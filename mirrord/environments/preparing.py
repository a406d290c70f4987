"""What an environment has for one commit: the layer that a recipe's commands leave in a checkout.

With it, code that has to be installed can be imported after every reset. The commands run as a
build does; what they change, in the tree and in the environment, is saved as a prepared layer that
every checkout of the commit with this environment has by default.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model import CommitId
from ..protocol import Preparation, SaveLayer
from .building import BuildLog, Builds, Plan, failed, layer_name, own_peer

_RECORD = "preparations.json"  # beside environment.json: by mirror and commit


@dataclass(eq=False, repr=False)
class Preparations:
    """The layers of environments. Belongs to one event loop."""

    builds: Builds

    def list(self, digest: str) -> list[Preparation]:
        """For which commits there is a layer, and for which none could be made."""
        known, name = self._read(digest), layer_name(digest)
        ready = [each for each in self.builds.checkouts.prepared_layers if each.saved.name == name]
        found = []
        for key in dict.fromkeys([*(f"{each.mirror}@{each.commit}" for each in ready), *known]):
            facts = known.get(key, {})
            if any(f"{each.mirror}@{each.commit}" == key for each in ready):
                facts = {"layer": name, "findings": facts.get("findings", [])}
            mirror, _, commit = key.partition("@")
            shown = {each: facts[each] for each in ("layer", "error", "findings") if each in facts}
            found.append(Preparation(mirror=mirror, commit=commit, **shown))
        return found

    def is_needed(self, plan: Plan, base: CommitId) -> bool:
        """Whether the recipe has commands for a commit that has no layer yet."""
        ready = [each.commit for each in self.list(plan.digest) if each.layer]
        return bool(plan.mirror and plan.commands and base not in ready)

    async def prepare(self, plan: Plan, base: CommitId, *, again: bool) -> None:
        """Run the recipe's commands in a checkout, and keep what they leave as a layer.

        Raises EnvironmentFailedError where they fail, or did and nothing has changed since.
        """
        builds, key, known = self.builds, f"{plan.mirror}@{base}", self._read(plan.digest)
        made_with = builds.made_with(plan.recipe)
        before = known.pop(key, {})
        if not again and "error" in before and before["made_with"] == made_with:
            raise failed(plan, f"{before['error']} (earlier, and nothing has changed)")
        began = time.perf_counter()
        facts: dict[str, Any] = {"made_with": made_with}
        with BuildLog.opened(builds.store.root / plan.digest / "log") as log:
            log.say(f"== preparing {key}\n")
            failure = await self._run(plan, base, log)
        if failure:
            facts |= {"error": failure, "tail": [*log.tail]}
        elif base != plan.commit:  # for which it was scanned when it was built
            prefix = builds.store.directory(plan.digest)
            facts["findings"] = await builds.scan(prefix, plan, base)
        (builds.store.root / plan.digest / _RECORD).write_text(json.dumps({**known, key: facts}))
        told = {"key": plan.recipe.key, "digest": plan.digest, "mirror": str(plan.mirror)}
        duration_s = round(time.perf_counter() - began, 3)
        if failure:
            builds.events.publish("environment.failed", **told, commit=base, detail=failure)
            raise failed(plan, failure)
        builds.events.publish("environment.prepared", **told, commit=base, duration_s=duration_s)

    async def _run(self, plan: Plan, base: CommitId, log: BuildLog) -> str | None:
        builds = self.builds
        async with builds.scratch() as scratch, builds.checkout(plan, base, plan.name) as found:
            prefix = Path(found.directory) / "environment"
            failure = await builds.run(plan, Path(found.path), prefix, scratch, log, plan.commands)
            if failure is None:
                await builds.checkouts.save(found.id, SaveLayer(name=plan.layer), own_peer())
        return failure

    def _read(self, digest: str) -> dict[str, dict[str, Any]]:
        with suppress(FileNotFoundError, ValueError):
            text = (self.builds.store.root / digest / _RECORD).read_bytes()
            return dict(json.loads(text))
        return {}
