"""Audits of several mirrors as operations. One that a crash ended goes on by itself, with the mirrors that are left.

What is struck while it only reads must never be told as damage: a mirror that could not be looked at is said to be left.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Any

from mirrord.model import AuditLevel

from .lab import Lab, Refused
from .operation import AFTER, BEFORE, Operation

_MIRRORS = 3
_GOES_ON_S = 30.0


class _Audit(Operation):
    """Of everything there is. Several mirrors are added to the lab for it."""

    level: AuditLevel

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        known = {mirror["name"] for mirror in lab.call("GET", "mirrors")}
        for number in range(_MIRRORS):
            if f"o__audited{number}" not in known:
                _add(lab, f"audited{number}")
        self._before = self._on_record()
        self._judged: dict[str, str] = {}
        self._id = ""

    def run(self) -> None:
        audit = self.lab.finish(
            self.lab.call("POST", "audits", {"level": self.level, "heal": False})
        )
        _must_tell_no_damage(audit)
        if audit["left"]:
            raise Refused({"code": "audit-left-mirrors", "detail": str(audit["findings"])})

    def look(self) -> None:
        """What it said of mirrors before it ended."""
        with closing(
            sqlite3.connect(f"file:{self.lab.state}/catalog.sqlite3?mode=ro", uri=True)
        ) as catalog:
            query = "SELECT audit_id, mirror_key, judged_at FROM judgements WHERE level = ? ORDER BY started_at, judged_at"
            rows = catalog.execute(query, (str(self.level),)).fetchall()
        self._id = rows[-1][0] if rows else ""
        self._judged = {key: at for audit, key, at in rows if audit == self._id}

    def outcome(self) -> str:
        return AFTER if self._on_record() - self._before else BEFORE

    def _on_record(self) -> set[str]:
        """Whole audits of everything at this level."""
        audits = self.lab.call("GET", "audits")
        return {
            audit["id"]
            for audit in audits
            if audit["level"] == self.level and not audit["left"] and len(audit["mirrors"]) > 1
        }

    def settle(self) -> None:
        if self.outcome() != AFTER and self._judged and self._id not in self._before:
            self._must_go_on()
        super().settle()

    def _must_go_on(self) -> None:
        """The schedule finishes it under its id, and what was judged is not judged again."""
        deadline = time.monotonic() + _GOES_ON_S
        while self._id not in self._on_record():
            assert time.monotonic() < deadline, "an interrupted audit does not go on"
            time.sleep(0.05)
        _must_tell_no_damage(self.lab.call("GET", f"audits/{self._id}"))
        judged = dict(self._judged)
        self.look()
        assert judged.items() <= self._judged.items(), "what was judged is judged again"


class QuickAudit(_Audit):
    name = "audit (quick)"
    level = AuditLevel.QUICK


class ClosureAudit(_Audit):
    name = "audit (closure)"
    level = AuditLevel.CLOSURE


class ContentAudit(_Audit):
    name = "audit (content)"
    level = AuditLevel.CONTENT


def _add(lab: Lab, short: str) -> None:
    (lab.root / "up" / f"o__{short}").symlink_to(lab.upstream.path)
    lab.finish(lab.call("POST", "mirrors", {"repo": f"o/{short}"}))
    lab.import_rows(short, lab.commits[1:4], repo=f"o/{short}")


def _must_tell_no_damage(audit: dict[str, Any]) -> None:
    wrong = [
        finding
        for finding in audit["findings"]
        if not finding["detail"].startswith("it could not be judged")
    ]
    assert not wrong, f"false alarm: {wrong[:2]}"
    assert not {state for state, count in audit["counts"].items() if count and state != "ok"}, (
        audit["counts"]
    )
