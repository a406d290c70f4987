"""The watched directory of datasets: a file in it is imported; health names a refused one."""

from collections.abc import Callable
from pathlib import Path

import anyio

from ..catalog import Catalog
from ..config import Settings
from ..jobs.events import Events
from ..jobs.operations import Operations
from ..jobs.watch import Watch, is_complete_name, signature_of
from ..presence import exists
from ..protocol import Operation


class DatasetWatch:
    """Imports the files of `directory`, while the settings say so."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        directory: Path,
        catalog: Catalog,
        operations: Operations,
        events: Events,
        start_import: Callable[[Path], Operation],
    ) -> None:
        self._settings, self._directory, self._catalog = settings, directory, catalog
        self._operations, self._events = operations, events
        self._start_import = start_import
        self._watch: Watch | None = None
        self._refused: dict[Path, str] = {}

    async def apply(self) -> None:
        """Start or stop watching, as the settings say."""
        is_wanted = self._settings().datasets.watch
        if is_wanted and self._watch is None:
            signatures = {}
            for dataset in await self._catalog.list_datasets():
                path = self._directory / Path(dataset.source).name
                signature = await anyio.to_thread.run_sync(signature_of, path)
                if signature and signature.changed_at < dataset.imported_at.timestamp():
                    signatures[path] = signature  # already imported in this state
            self._watch = Watch(self._directory, is_complete_name, self._import, known=signatures)
            await self._watch.open()
        elif not is_wanted:
            await self.close()

    async def close(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()

    async def _import(self, path: Path) -> None:
        """Import a file. A refused one is a health warning while it exists."""
        ended = await self._operations.wait(self._start_import(path).id)
        if ended.error is None:
            self._refused.pop(path, None)
        else:
            self._refused[path] = ended.error.code
            self._events.publish(
                "dataset.refused", file=path.name, code=ended.error.code, detail=ended.error.detail
            )

    def warnings(self) -> list[str]:
        """Return health warnings, without the reasons, which quote rows: health is public."""
        hint = "`mirrord operation show` says why"
        return [
            f"{path.name} in datasets: cannot import it ({code}); {hint}"
            for path, code in self._refused.items()
            if exists(path)
        ]
