"""Answers of a daemon for tests of the clients, and a short path for its socket."""

from __future__ import annotations

COMMIT, TREE = "a" * 40, "b" * 40
HEALTH = {"status": "ok", "reasons": [], "version": "1"}


LEASE = {
    "id": "a" * 16,
    "path": "/state/checkouts/x/tree",
    "directory": "/state/checkouts/x",
    "mirror": "psf__requests",
    "commit": COMMIT,
    "tree": TREE,
    "instance": "psf__requests-1",
    "history": "sealed",
    "view": "agent",
    "backend": "pool",
    "owner_uid": 0,
    "owner_gid": 0,
    "taken_by": 0,
    "created_at": "2026-01-01T00:00:00Z",
    "expires_at": "2126-01-01T02:00:00Z",
    "timings": {},
}


PROOF = {
    "head": COMMIT,
    "tree": TREE,
    "index": TREE,
    "control_files": 1,
    "files_checked": 2,
    "files_restored": 0,
    "files_removed": 0,
    "method": "m",
}


OPERATION = {
    "id": "op1",
    "kind": "mirror.sync",
    "subject": "psf__requests",
    "state": "running",
    "progress": {"done": 1, "total": 4, "unit": "objects"},
    "started_at": "2026-01-01T00:00:00Z",
}


CHECKOUT = f"/v1/checkouts/{LEASE['id']}"


CHECKOUT_ROUTES = {
    ("POST", "/v1/checkouts"): lambda h: h.answer(LEASE, 201),
    ("DELETE", CHECKOUT): lambda h: h.answer(b"", 204),
    ("POST", f"{CHECKOUT}/reset"): lambda h: h.answer(
        {**LEASE, "commit": "c" * 40, "proof": PROOF}
    ),
    ("GET", f"{CHECKOUT}/diff"): lambda h: h.answer(b"diff \xff\n", media_type="text/x-diff"),
    ("POST", f"{CHECKOUT}/apply"): lambda h: h.answer(
        {**LEASE, "strategy": "crlf" if "strategy=tolerant" in h.path else "exact"}
    ),
    ("POST", f"{CHECKOUT}/renew"): lambda h: h.answer(
        {**LEASE, "expires_at": "2126-01-01T03:00:00Z"}
    ),
}
