"""What each verb is called with in tests."""

from __future__ import annotations

ARGUMENTS = {
    "top": ["--once"],
    "mirror add": ["a/b"],
    "mirror show": ["a/b"],
    "mirror remove": ["a/b"],
    "mirror set-url": ["a/b", "https://h/a/b"],
    "credential check": ["https://git.example.invalid/a/b"],
    "dataset import": [__file__],
    "dataset derive": [__file__],
    "dataset show": ["d"],
    "dataset prepare": ["d"],
    "dataset diff": ["d", "e"],
    "dataset export": ["d"],
    "instance show": ["i"],
    "dataset remove": ["d"],
    "environment build": ["i"],
    "environment import": [__file__],
    **{f"environment {verb}": ["k"] for verb in ("show", "log", "remove")},
    "pin": ["a/b", "c" * 40],
    "unpin": ["a/b", "c" * 40],
    "checkout": ["i"],
    "reset": ["a" * 16],
    "fork": ["a" * 16],
    "snapshot": ["a" * 16],
    "snapshots": ["a" * 16],
    "save": ["a" * 16, "name"],
    "diff": ["a" * 16],
    "apply": ["a" * 16, __file__],
    "restore": ["a" * 16, "--commit", "c" * 40, "file"],
    "attach": ["a" * 16, "/nonexistent"],
    "release": ["a" * 16],
    "renew": ["a" * 16],
    "grade": ["a" * 16],
    "receipt": ["a" * 16],
    "exec": ["i", "--", "true"],
    "refs log": ["a/b"],
    "refs diff": ["a/b", "x", "y"],
    "refs restore": ["a/b", "x"],
    "bundle create": ["a/b", "/tmp/bundle"],
    "bundle import": [__file__],
    **{f"service {verb}": ["--dry-run"] for verb in ("install", "uninstall")},
    **{f"operations {verb}": ["id"] for verb in ("show", "watch", "wait", "cancel")},
}


NEEDS_NO_DAEMON = {
    *("serve", "verify-seal", "doctor", "support-bundle", "config check", "config show"),
    *("service install", "service uninstall"),
}
