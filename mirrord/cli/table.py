"""Every verb in one table: name, function, summary, and the statuses it can end with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EXIT_STATUSES = {
    0: "done",
    1: "a bug",
    2: "wrong usage or configuration",
    3: "not allowed",
    4: "not found",
    5: "conflict: held, busy, exists",
    6: "upstream failed",
    7: "a resource is missing: disk, kernel feature, limit",
    8: "integrity: a finding that is not healed, a leaking seal, a failed proof",
    9: "no daemon at the socket",
}


class Verb(NamedTuple):
    """`at` is module:function below mirrord.cli; `ends` lists the statuses besides 0, 1 and 2."""

    name: str
    at: str
    ends: tuple[int, ...]
    summary: str


GROUPS = {
    "mirror": "Complete copies of upstream repositories.",
    "dataset": "Instances, and the commits they record.",
    "refs": "The ref history of a mirror.",
    "operations": "Background work of the daemon.",
    "bundle": "A mirror as one file, and back.",
    "config": "The configuration file.",
}

_LOOK, _FIND = (3, 9), (3, 4, 9)
_WAIT, _CHECKOUT = (3, 4, 5, 6, 7, 8, 9), (3, 4, 6, 7, 8, 9)

VERBS = (
    Verb("serve", "service:serve", (3, 5, 7), "Run the daemon in the foreground."),
    Verb("status", "service:status", _LOOK, "Show the daemon and what it holds, at a glance."),
    Verb("mirror add", "mirrors:add", (3, 5, 6, 7, 9), "Add mirrors and sync them."),
    Verb("mirror list", "mirrors:list_all", _LOOK, "List all mirrors."),
    Verb("mirror show", "mirrors:show", _FIND, "Show one mirror."),
    Verb("mirror sync", "mirrors:sync", (3, 4, 6, 7, 9), "Sync mirrors with upstream."),
    Verb("mirror remove", "mirrors:remove", (3, 4, 5, 9), "Remove a mirror that nothing needs."),
    Verb(
        "dataset import",
        "datasets:import_file",
        (3, 6, 7, 8, 9),
        "Import a file: mirror what is missing, pin what is recorded.",
    ),
    Verb("dataset list", "datasets:list_all", _LOOK, "List all datasets."),
    Verb(
        "dataset show",
        "datasets:show",
        _FIND,
        "Show a dataset, its bad rows and its unpinned commits.",
    ),
    Verb(
        "dataset remove",
        "datasets:remove",
        _FIND,
        "Remove a dataset, and the pins that nobody else owns.",
    ),
    Verb("dataset formats", "datasets:formats", _LOOK, "List the dataset formats."),
    Verb("pin", "mirrors:pin", (3, 4, 6, 8, 9), "Keep a commit of a mirror alive."),
    Verb("unpin", "mirrors:unpin", _FIND, "Remove one of your pins."),
    Verb("pins", "mirrors:pins", _FIND, "List the pins of a mirror, or of all."),
    Verb(
        "audit", "audits:audit", (3, 4, 7, 8, 9), "Prove that every recorded commit can be served."
    ),
    Verb("heal", "audits:heal", _CHECKOUT, "Repair mirrors at object level."),
    Verb("checkout", "checkouts:checkout", _CHECKOUT, "Lease a working tree; prints its path."),
    Verb(
        "reset",
        "checkouts:reset",
        (3, 4, 5, 7, 8, 9),
        "Reset a checkout, or move it to another instance.",
    ),
    Verb(
        "diff",
        "checkouts:diff",
        (3, 4, 7, 9),
        "Print what changed since the base commit, as a patch.",
    ),
    Verb("apply", "checkouts:apply", (3, 4, 5, 9), "Apply a patch to a checkout."),
    Verb(
        "restore",
        "checkouts:restore",
        (3, 4, 8, 9),
        "Bring files of a pinned commit into a checkout.",
    ),
    Verb("release", "checkouts:release", (3, 4, 5, 9), "Release checkouts."),
    Verb("renew", "checkouts:renew", _FIND, "Move the deadline of a checkout."),
    Verb("checkouts", "checkouts:list_all", _LOOK, "List the held checkouts."),
    Verb("exec", "execute:execute", _CHECKOUT, "Run a command in a temporary checkout."),
    Verb(
        "verify-seal",
        "local:verify_seal",
        (3, 4, 7, 8),
        "Prove that a repository shows nothing after a commit.",
    ),
    Verb(
        "rehearse",
        "rehearse:rehearse",
        _CHECKOUT,
        "Try every instance: checkout, patches, diff, reset.",
    ),
    Verb("refs log", "mirrors:refs_log", _FIND, "List the records of a mirror's ref history."),
    Verb("refs diff", "mirrors:refs_diff", _FIND, "Show what changed between two records."),
    Verb(
        "refs restore",
        "mirrors:refs_restore",
        (3, 4, 5, 7, 9),
        "Put a mirror's refs back to a record.",
    ),
    Verb(
        "bundle create",
        "bundles:create",
        (3, 4, 7, 8, 9),
        "Write a mirror with everything known about it into one file.",
    ),
    Verb(
        "bundle import",
        "bundles:import_file",
        (3, 4, 5, 7, 8, 9),
        "Make a mirror from a bundle, or add a bundle to one.",
    ),
    Verb("operations list", "operations:list_all", _LOOK, "List operations."),
    Verb("operations show", "operations:show", _FIND, "Show one operation."),
    Verb(
        "operations watch",
        "operations:watch",
        _WAIT,
        "Print an operation's progress until it ends.",
    ),
    Verb("operations wait", "operations:wait", _WAIT, "Wait until an operation ends."),
    Verb("operations cancel", "operations:cancel", _FIND, "Cancel an operation."),
    Verb("doctor", "local:doctor", (7,), "Report what this host can and cannot do."),
    Verb("reload", "service:reload", _LOOK, "Have the daemon read its configuration again."),
    Verb("events", "service:events", _LOOK, "Print recent events; --follow prints new ones."),
    Verb("config check", "local:config_check", (), "Check a configuration file."),
    Verb(
        "config show",
        "local:config_show",
        (),
        "Print the configuration in effect, defaults included.",
    ),
)


def exit_lines(statuses: Iterable[int]) -> str:
    """The meaning of each status, one per line."""
    return "\n".join(f"  {status}  {EXIT_STATUSES[status]}" for status in statuses)
