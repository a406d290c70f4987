"""The service of environments: finds the recipe of a name, and builds what is missing.

A name is an instance's id, or the key of an imported recipe or of an environment that was built. A
build runs once at a time; after a failure it is repeated when its recipe, interpreter or settings
change. `building.py` builds; `templates/environments.py` has what is ready on disk.
"""

import asyncio
import builtins
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio.to_thread

from .. import errors, protocol
from ..catalog import InstanceRow
from ..checkouts.prepared import layer_name
from ..datasets.service import Datasets
from ..git.objects.repository import open_objects, read_commit
from ..git.objects.trees import BaseTree
from ..jobs.operations import together
from ..jsontext import loads
from ..model import ENVIRONMENT_KEY, CommitId, CommitRole, MirrorName, shown
from ..presence import exists
from ..protocol import Progress, ProgressSink, Recipe
from ..templates.environments import EnvironmentRecord, not_found
from ..workers.coalesce import Coalescer, SharedWork
from .building import Builds, Plan, failed
from .images.importing import Images
from .images.rows import RowImages
from .images.trees import ImageTrees
from .lacks import lacks_of
from .leaks import Leaks
from .recipes import checked, digest_of, key_of, recipes_of_toml
from .requirements import expanded, reads_tree
from .specs import recipe_of

# a few small files of one commit
_READ_TIMEOUT = timedelta(minutes=1)
# builds at a time; the others wait
_AT_ONCE = 2


@dataclass(kw_only=True, eq=False, repr=False)
class Environments:
    """The environments of one daemon. Belongs to one event loop."""

    builds: Builds
    images: Images
    recipes: Path
    datasets: Datasets
    leaks: Leaks
    _running: Coalescer[None] = field(default_factory=Coalescer)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    def __post_init__(self) -> None:
        builds = self.builds
        self.store, self.mirrors = builds.store, builds.mirrors
        self.image_trees = ImageTrees(
            store=builds.store, checkouts=builds.checkouts, mirrors=builds.mirrors,
            preparations=builds.preparations, leaks=self.leaks,
        )  # fmt: skip
        self.row_images = RowImages(
            templates=builds.place / "datasets.json", images=self.images,
            checkouts=builds.checkouts, datasets=self.datasets,
        )  # fmt: skip

    async def close(self) -> None:
        """Cancel the running builds."""
        await self._running.close()
        await self.image_trees.close()

    # -- recipes -----------------------------------------------------------------------------------

    async def import_recipes(self, text: str, source: str) -> builtins.list[Recipe]:
        """Import the recipes of a TOML file; they override instances' recipes of the same key."""
        recipes = recipes_of_toml(text, source)

        def write() -> None:
            self.recipes.mkdir(mode=0o700, parents=True, exist_ok=True)
            for recipe in recipes:
                new = self.recipes / f"{recipe.key}.json.new"
                new.write_bytes(protocol.canonical(recipe))
                new.rename(self.recipes / f"{recipe.key}.json")

        await anyio.to_thread.run_sync(write)
        self.mirrors.events.publish("recipes.imported", count=len(recipes))
        return recipes

    async def _find_imported(self, key: str) -> Recipe | None:
        # first: it becomes the name of a file
        if not ENVIRONMENT_KEY.fullmatch(key):
            return None
        path = self.recipes / f"{key}.json"
        if not exists(path):  # the usual case of a grade, which no thread is needed for
            return None
        try:
            text = await anyio.to_thread.run_sync(path.read_bytes)
        except FileNotFoundError:
            return None
        return checked(Recipe.from_json(loads(text)))

    async def find_recipe(self, row: InstanceRow) -> Recipe | None:
        """Return the recipe of an instance; None if it has none that can be used."""
        with suppress(errors.RecipeNotFoundError, errors.InvalidRecipeError):
            return await self._find_imported(key_of(row)) or recipe_of(row)
        return None

    # -- plans -------------------------------------------------------------------------------------

    async def plan(
        self, request: protocol.BuildEnvironments
    ) -> tuple[builtins.list[Plan], builtins.list[protocol.FailedBuild]]:
        """Plan the environments of a request; also return the instances of its dataset that have no
        recipe.

        Raises NotFoundError, and for explicit names
        RecipeNotFoundError and InvalidRecipeError.
        """
        plans: dict[str, Plan] = {}
        refused = []
        for name in request.names:
            row = await self.datasets.find_instance(name, request.dataset)
            planned = self._plan_of(row, request.frozen) if row else self._plan_of_key(name)
            _merge(plans, await planned)
        if not request.names and request.dataset:
            for identity in await self.datasets.list_instance_ids(request.dataset):
                row = await self.datasets.find_instance(identity, request.dataset)
                if row is None:  # removed meanwhile
                    continue
                try:
                    plan = await self._plan_of(row, request.frozen)
                except (errors.RecipeNotFoundError, errors.InvalidRecipeError) as error:
                    refused.append(protocol.FailedBuild(key=identity, detail=error.message))
                else:
                    _merge(plans, plan if request.prewarm else plan._replace(bases=()))
        return list(plans.values()), refused

    async def _plan_of(self, row: InstanceRow, frozen: bool) -> Plan:
        """Plan the environment of an instance, to be built at its setup commit if it has one."""
        imported = await self._find_imported(key_of(row))
        recipe = imported or recipe_of(row, frozen=frozen)
        setup = [commit for commit, role in row.commits if role is CommitRole.ENVIRONMENT]
        bases = [row.base_commit] if row.base_commit else []
        return await self._plan(recipe, row.mirror, next(iter([*setup, *bases]), None), bases)

    async def _plan_of_key(self, name: str) -> Plan:
        """Plan the environment of an imported recipe, or of an earlier build."""
        if (recipe := await self._find_imported(name)) is not None:
            return await self._plan(recipe, None, None, ())
        for record in self.store.iter_records(name):
            content = record.facts
            mirror = MirrorName.parse(content["mirror"]) if content["mirror"] else None
            if content["recipe"] is None:
                raise errors.InvalidRequestError(
                    f"cannot build environment {shown(name)}: it is an image",
                    hint="import it again: `mirrord environment import`",
                )
            recipe = Recipe.from_json(content["recipe"])
            return Plan(recipe, record.digest, mirror, content["commit"], ())
        raise errors.NotFoundError(
            not_found(name).message,
            hint="name an instance, or import a recipe: `mirrord environment import FILE`",
        )

    async def _plan(
        self, recipe: Recipe, mirror: MirrorName | None, commit: CommitId | None,
        bases: Sequence[CommitId],
    ) -> Plan:  # fmt: skip
        if reads_tree(recipe):
            if mirror is None or commit is None:
                raise errors.NotFoundError(
                    f"cannot build environment {recipe.key}: its recipe reads files of a tree",
                    hint="name an instance that has this environment",
                )
            path = self.mirrors.path(mirror)
            recipe = await self.mirrors.workers.run(
                read_requirements, path, commit, recipe, timeout=_READ_TIMEOUT
            )
        return Plan(recipe, digest_of(recipe), mirror, commit, tuple(bases))

    # -- builds ------------------------------------------------------------------------------------

    async def build(
        self,
        plans: Sequence[Plan],
        refused: Sequence[protocol.FailedBuild],
        again: bool,
        progress: ProgressSink,
    ) -> protocol.BuildReport:
        """Build and prepare what is missing. Failures are reported, not raised."""
        report = protocol.BuildReport(ready=[], failed=[*refused])
        total, done = sum(1 + len(plan.bases) for plan in plans), 0

        def step(note: str, more: int = 0) -> None:
            nonlocal done
            done += more
            progress(Progress(done=done, total=total, unit="builds", note=note))

        async def one(plan: Plan) -> None:
            left = 1 + len(plan.bases)
            try:
                step(plan.name)
                await self._build(plan, again)
                report.ready.append(plan.name)
                for base in plan.bases:
                    step(f"{plan.name} for {base[:12]}", 1)
                    left -= 1
                    if self.builds.needs_preparation(plan, base):
                        await self._prepare(plan, base, again)
                        report.prepared.append(base)
            except errors.EnvironmentFailedError as error:
                missing = [protocol.Missing.from_json(each) for each in error.facts["missing"]]
                report.failed.append(
                    protocol.FailedBuild(key=plan.recipe.key, detail=error.message, missing=missing)
                )
            step(plan.name, left)

        await together(map(one, plans))
        return report

    async def _build(self, plan: Plan, again: bool) -> None:
        """Build an environment unless it is ready. Raises EnvironmentFailedError, also for an
        earlier failure if nothing has changed since.
        """

        async def run(_: SharedWork[None]) -> None:
            async with self._turns:
                await self.mirrors.room.ensure(f"build environment {plan.name}")
                await self.builds.build(plan)

        record = self.store.record(plan.digest)
        if record is not None and record.is_ready:
            return
        made_with = self.builds.made_with(plan.recipe)
        if record is not None and not again and record.facts["made_with"] == made_with:
            note = "an earlier build; nothing has changed"
            raise failed(plan, record.facts["error"], record.facts["tail"], note)
        await self._running.join(plan.digest, run)

    async def _prepare(self, plan: Plan, base: CommitId, again: bool) -> None:
        async def run(_: SharedWork[None]) -> None:
            async with self._turns:
                await self.builds.prepare(plan, base, again=again)

        await self._running.join(f"{plan.digest} {plan.mirror}@{base}", run)

    # -- environments ------------------------------------------------------------------------------

    def list(self) -> builtins.list[protocol.Environment]:
        """Return all environments, ready, failed or being built, by key."""
        stored = [self._describe(record) for record in self.store.list()]
        return sorted([*self.builds.running(), *stored], key=lambda env: (env.key, env.digest))

    def get(self, name: str) -> protocol.Environment:
        """Return the environment of a name, with its recipe; a ready one before a failed one."""
        for running in self.builds.running():
            if name in (running.key, running.name):
                return running
        record = self._record(name)
        written = record.facts["recipe"]
        recipe = Recipe.from_json(written) if written is not None else None
        prepared = self.builds.preparations.list(record.digest)
        scans = self.leaks.list(record.digest)
        missing = lacks_of(recipe, None, ()) if recipe else []
        return replace(
            self._describe(record), recipe=recipe, prepared=prepared, scans=scans, missing=missing
        )

    def name_for(self, row: InstanceRow) -> str:
        """Return the name of an instance's environment: its image, or else of those with its key
        one with a layer for its base commit, or else the key.
        """
        if image := self.row_images.find(row):
            return image.name
        key, base = key_of(row), (row.mirror.key, row.base_commit)
        layers = self.builds.checkouts.prepared.all()
        prepared = {
            layer.saved.name for layer in layers if (layer.mirror.key, layer.commit) == base
        }
        for record in sorted(self.store.iter_records(key), key=lambda record: -record.at):
            if record.is_ready and layer_name(record.digest) in prepared:
                return record.name
        return key

    def find_log(self, name: str) -> tuple[Path, Callable[[], bool]]:
        """Return the log of a build, and a function that tells whether the build still runs."""
        running = self.builds.running()
        digest = next((build.digest for build in running if name in (build.key, build.name)), None)
        if digest is None or (path := self.builds.find_log(digest)) is None:
            return self.store.root / self._record(name).digest / "log", lambda: False
        return path, lambda: self.builds.find_log(digest) is not None

    async def remove(self, name: str) -> None:
        """Remove all environments of a name; for a bare key, also the imported recipe.

        Raises ConflictError.
        """
        records = list(self.store.iter_records(name))
        path = self.recipes / f"{name}.json"
        imported = "@" not in name and await self._find_imported(name) is not None
        if not records and not imported:
            raise not_found(name)
        for record in records:
            self.builds.checkouts.prepared.remove_of(record.digest)
            self.store.remove(record.digest)
            self.mirrors.events.publish("environment.removed", key=record.key, digest=record.digest)
        if imported:
            await anyio.to_thread.run_sync(path.unlink)
        await self.builds.sweep()
        self.images.sweep()

    def _record(self, name: str) -> EnvironmentRecord:
        """Return the newest ready environment of a name, or else the last failed build."""
        records = sorted(
            self.store.iter_records(name), key=lambda record: (record.is_ready, record.at)
        )
        if not records:
            raise not_found(name)
        return records[-1]

    def _describe(self, record: EnvironmentRecord) -> protocol.Environment:
        content = record.facts
        return protocol.Environment(
            **{name: content[name] for name in _FIELDS if name in content},
            name=record.name,
            python=content["recipe"]["python"] if content["recipe"] else None,
            image=protocol.Image.from_json(content["image"]) if "image" in content else None,
            built_at=datetime.fromtimestamp(record.at, UTC),
            used_at=datetime.fromtimestamp(self.store.used_at(record.digest), UTC),
            holders=self.store.held[record.digest],
        )


_FIELDS = (
    *("key", "digest", "state", "source", "mirror", "commit", "interpreter", "duration_s"),
    *("manifest", "files", "size_bytes", "shared_bytes", "dropped", "error", "tail", "findings"),
)


def _merge(plans: dict[str, Plan], plan: Plan) -> None:
    """Add a plan, or its bases to the plan of the same environment."""
    if planned := plans.get(plan.digest):
        plan = planned._replace(bases=tuple(dict.fromkeys([*planned.bases, *plan.bases])))
    plans[plan.digest] = plan


def read_requirements(git_dir: Path, commit: CommitId, recipe: Recipe) -> Recipe:
    """Expand a recipe with the packages that files of the commit name. Runs in a worker."""
    with open_objects(git_dir) as objects:
        tree = BaseTree(objects, read_commit(objects, commit).tree)

        def read(path: str) -> str | None:
            entry = tree.find(path.encode())
            if entry is None or entry.is_tree or entry.is_submodule or entry.is_symlink:
                return None
            content: bytes = objects.read_blob(entry.oid)
            return content.decode(errors="replace")

        return expanded(recipe, read)
