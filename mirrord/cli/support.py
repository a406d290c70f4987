"""`mirrord doctor --report`: diagnostics for a bug report, without anything of a task."""

import io
import json
import tarfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__, config, errors
from ..client.primitives_sync import whole_file
from ..config import Settings
from ..doctor import examine
from ..doctor.support import Scrubber, find_places, find_versions, read_journal, read_log
from ..errors import full_disk_named
from ..places import Layout
from ..presence import exists, lexists
from ..telemetry import masked
from .session import Session

# A report is attached to an issue: it has the newest of each.
_EVENTS_MAX = 1000
_OPERATIONS_MAX = 200
_README = """\
Made by `mirrord doctor --report` {version} at {at}. manifest.json lists the parts, and why parts
are missing. Left out: patches, rows, ids of instances, results of operations, contents of files and
checkouts, credentials, and everything in a URL but its host. Commit ids are replaced by pseudonyms,
consistently. Read it before you send it.
"""


def write_report(session: Session, path: Path) -> None:
    """Write what can be had, without a daemon and as any user; missing parts are listed."""
    made_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    parts, missing = {}, {}
    for name, collect in _Parts(session).all().items():
        try:
            parts[name] = collect()
        except (errors.MirrordError, OSError, ValueError) as error:
            missing[name] = Scrubber().text(str(error))
            session.note(f"without {name}: {missing[name]}")
    manifest = {"made_at": made_at, "version": __version__, "parts": [*parts], "missing": missing}
    readme = _README.format(version=__version__, at=made_at)
    _write(path, {"README": readme, "manifest.json": _text(manifest), **parts})
    session.answer({"path": str(path), **manifest}, [str(path)])


class _Parts:
    """What is asked for the parts; each method but `state_dir` and `settings` returns one."""

    def __init__(self, session: Session) -> None:
        self._session, self._client, self._scrub = session, session.client, Scrubber()

    def all(self) -> dict[str, Callable[[], str]]:
        """Return what makes each part, by the name of its file."""
        client, scrub = self._client, self._scrub
        return {
            "versions.json": lambda: _text(find_versions()),
            "configuration.json": self.configuration,
            "doctor.json": self.doctor,
            "places.json": lambda: _text(scrub.value(find_places(self.state_dir()))),
            "health.json": lambda: _text(scrub.facts(client.health().to_json())),
            "status.json": lambda: _text(scrub.facts(client.status().to_json())),
            "running-configuration.json": lambda: _text(
                scrub.value(client.configuration().to_json())
            ),
            "activity.json": self.activity,
            "events.jsonl": self.events,
            "operations.jsonl": self.operations,
            "metrics.txt": lambda: scrub.text(client.metrics()),
            "journal.jsonl": self.journal,
        }

    def settings(self) -> Settings:
        return config.load(self._session.config_path)

    def state_dir(self) -> Path:
        """Return that of the daemon that answers, which may have another configuration."""
        try:
            return Path(self._client.status().state_dir)
        except errors.MirrordError:
            return self.settings().state_dir

    def configuration(self) -> str:
        return _text(self._scrub.value(json.loads(masked(self.settings().model_dump_json()))))

    def doctor(self) -> str:
        checks = examine(self.settings(), self._session.config_path)
        return _text([self._scrub.value(check._asdict()) for check in checks])

    def activity(self) -> str:
        answer = self._client.activity(history=True).to_json()
        operations = map(self._scrub.operation, answer.pop("operations", []))
        return _text({**self._scrub.facts(answer), "operations": [*operations]})

    def events(self) -> str:
        recent = deque(self._client.events(after="0", follow=False), maxlen=_EVENTS_MAX)
        scrubbed = [
            {"id": event.id, "at": event.at.isoformat(), "name": event.name,
             **self._scrub.event(event.name, event.fields)}
            for event in recent
        ]  # fmt: skip
        return _lines(scrubbed)

    def operations(self) -> str:
        listed = self._client.list_operations()[:_OPERATIONS_MAX]
        return _lines([self._scrub.operation(operation.to_json()) for operation in listed])

    def journal(self) -> str:
        try:
            return _lines(list(read_journal(self._scrub)))
        except errors.MirrordError:
            log = Layout(self.state_dir()).detached_log
            if not exists(log):
                raise
            return _lines(list(read_log(log, self._scrub)))


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


def _lines(values: list[Any]) -> str:
    return "".join(json.dumps(value, ensure_ascii=False, default=str) + "\n" for value in values)


def _write(path: Path, parts: dict[str, str]) -> None:
    """Write a new archive with mode 0600; leaves nothing on an error."""
    try:
        if lexists(path):
            hint = "name another file, or remove it"
            raise errors.ConflictError(f"cannot write {path}: it exists", hint=hint)
        with (
            full_disk_named(str(path)),
            whole_file(path) as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in parts.items():
                content = text.encode(errors="replace")
                member = tarfile.TarInfo(f"mirrord-support/{name}")
                member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        fact = f"cannot write {path}: {error.strerror}"
        raise errors.UsageError(fact, hint="name a file in a writable directory") from error
