"""Every verb of the command line, in one table: its name, the function behind it, one line about it, and how it can end."""

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
    """`at` is module:function below mirrord.cli; `ends` are the statuses besides 0, 1 and 2."""

    name: str
    at: str
    summary: str
    ends: tuple[int, ...]


GROUPS = {
    "mirror": "Complete copies of upstream repositories.",
    "dataset": "Instances, and the commits they record.",
    "refs": "The ref history of a mirror.",
    "operations": "Background work of the daemon.",
    "bundle": "A mirror as one file, and back.",
    "config": "The configuration file.",
}

VERBS = (
    Verb("serve", "service:serve", "Run the daemon in the foreground.", (3, 5, 7)),
    Verb("status", "service:status", "Show the daemon and what it holds, at a glance.", (3, 9)),
    Verb("mirror add", "mirrors:add", "Add mirrors and sync them.", (3, 5, 6, 7, 9)),
    Verb("mirror list", "mirrors:list_all", "List all mirrors.", (3, 9)),
    Verb("mirror show", "mirrors:show", "Show one mirror.", (3, 4, 9)),
    Verb(
        "mirror sync",
        "mirrors:sync",
        "Bring mirrors up to date; all when none is named.",
        (3, 4, 6, 7, 9),
    ),
    Verb("mirror remove", "mirrors:remove", "Remove a mirror that nothing needs.", (3, 4, 5, 9)),
    Verb(
        "dataset import",
        "datasets:import_file",
        "Import a file: mirror what is missing, pin what is recorded.",
        (3, 6, 7, 8, 9),
    ),
    Verb("dataset list", "datasets:list_all", "List all datasets.", (3, 9)),
    Verb(
        "dataset show",
        "datasets:show",
        "Show one dataset, its bad rows, its unpinned commits.",
        (3, 4, 9),
    ),
    Verb(
        "dataset remove",
        "datasets:remove",
        "Remove a dataset, and the pins that nobody else owns.",
        (3, 4, 9),
    ),
    Verb(
        "dataset formats",
        "datasets:formats",
        "List the dataset formats that can be imported.",
        (3, 9),
    ),
    Verb("pin", "pins:pin", "Keep a commit of a mirror alive.", (3, 4, 6, 8, 9)),
    Verb("unpin", "pins:unpin", "Remove one of your pins.", (3, 4, 9)),
    Verb("pins", "pins:list_all", "List the pins of a mirror, or of all.", (3, 4, 9)),
    Verb(
        "audit", "audits:audit", "Prove that every recorded commit can be served.", (3, 4, 7, 8, 9)
    ),
    Verb("heal", "audits:heal", "Repair mirrors at object level.", (3, 4, 6, 7, 8, 9)),
    Verb(
        "checkout",
        "checkouts:checkout",
        "Lease a working tree; prints its path.",
        (3, 4, 6, 7, 8, 9),
    ),
    Verb(
        "reset",
        "checkouts:reset",
        "Reset a checkout, or move it to another instance.",
        (3, 4, 5, 7, 8, 9),
    ),
    Verb(
        "diff",
        "checkouts:diff",
        "Print what changed since the base commit, as a patch.",
        (3, 4, 7, 9),
    ),
    Verb("apply", "checkouts:apply", "Apply a patch to a checkout.", (3, 4, 5, 9)),
    Verb(
        "restore",
        "checkouts:restore",
        "Bring files of a pinned commit into a checkout.",
        (3, 4, 8, 9),
    ),
    Verb("release", "checkouts:release", "Release checkouts.", (3, 4, 5, 9)),
    Verb("renew", "checkouts:renew", "Move the deadline of a checkout.", (3, 4, 9)),
    Verb("checkouts", "checkouts:list_all", "List the checkouts that are held.", (3, 9)),
    Verb("exec", "execute:execute", "Run a command in a temporary checkout.", (3, 4, 6, 7, 8, 9)),
    Verb(
        "verify-seal",
        "seals:verify",
        "Prove that a repository shows nothing after a commit.",
        (3, 4, 7, 8),
    ),
    Verb(
        "rehearse",
        "rehearse:rehearse",
        "Try every instance: checkout, patches, diff, reset.",
        (3, 4, 6, 7, 8, 9),
    ),
    Verb("refs log", "refs:log", "List the records of a mirror's ref history.", (3, 4, 9)),
    Verb("refs diff", "refs:diff", "Show what upstream did between two records.", (3, 4, 9)),
    Verb("refs restore", "refs:restore", "Put a mirror's refs back to a record.", (3, 4, 5, 7, 9)),
    Verb(
        "bundle create",
        "bundles:create",
        "Write a mirror with all that is known of it into one file.",
        (3, 4, 7, 8, 9),
    ),
    Verb(
        "bundle import",
        "bundles:import_file",
        "Make a mirror of such a file, or add to one.",
        (3, 4, 5, 7, 8, 9),
    ),
    Verb("operations list", "operations:list_all", "List what runs and what ran.", (3, 9)),
    Verb("operations show", "operations:show", "Show one operation.", (3, 4, 9)),
    Verb(
        "operations watch",
        "operations:watch",
        "Print an operation's progress until it ends.",
        (3, 4, 5, 6, 7, 8, 9),
    ),
    Verb(
        "operations wait", "operations:wait", "Wait until an operation ends.", (3, 4, 5, 6, 7, 8, 9)
    ),
    Verb(
        "operations cancel", "operations:cancel", "End an operation before it is done.", (3, 4, 9)
    ),
    Verb("doctor", "examination:doctor", "Report what this host can and cannot do.", (7,)),
    Verb("reload", "service:reload", "Have the daemon read its configuration again.", (3, 9)),
    Verb("events", "service:events", "Print recent events; with --follow, new ones too.", (3, 9)),
    Verb("config check", "configuration:check", "Check a configuration file.", ()),
    Verb(
        "config show",
        "configuration:show",
        "Print the configuration in effect, defaults included.",
        (),
    ),
)


def exit_lines(statuses: Iterable[int]) -> str:
    """What each status means, one a line."""
    return "\n".join(f"  {status}  {EXIT_STATUSES[status]}" for status in statuses)
