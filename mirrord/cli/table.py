"""Every verb in one table: name, function, summary, and the statuses it can end with."""

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

GROUPS = {
    "mirror": "Complete copies of upstream repositories.",
    "environment": "What instances need to run, built once.",
    "dataset": "Instances, and the commits they record.",
    "instance": "Tasks of the datasets.",
    "refs": "The ref history of a mirror.",
    "operations": "Background work of the daemon.",
    "bundle": "A mirror as one file, and back.",
    "config": "The configuration file.",
    "service": "This mirrord as a service of the host's systemd.",
}


class Verb(NamedTuple):
    """`at` is module:function below mirrord.cli; `ends` lists the statuses besides 0, 1 and 2."""

    name: str
    at: str
    ends: tuple[int, ...]
    summary: str


# name; function; the digits of `ends`; summary
_TABLE = """
serve; status:serve; 357; Run the daemon in the foreground.
status; status:status; 39; Show the daemon and what it holds, at a glance.
top; top:top; 39; Show what the daemon does now, live.
mirror add; mirrors:add; 35679; Add mirrors and sync them.
mirror list; mirrors:list_all; 39; List all mirrors.
mirror show; mirrors:show; 349; Show one mirror.
mirror sync; mirrors:sync; 34679; Sync mirrors with upstream.
mirror remove; mirrors:remove; 3459; Remove a mirror that nothing needs.
dataset import; datasets:add; 36789; Import rows: mirror what is missing, pin what is recorded.
dataset list; datasets:list_all; 39; List all datasets.
dataset show; datasets:show; 349; Show a dataset, its bad rows and its unpinned commits.
dataset prepare; datasets:prepare; 346789; Make the first checkouts of a dataset warm, now.
dataset diff; datasets:diff; 349; Show which rows differ between two datasets.
dataset export; datasets:export; 349; Print the rows as canonical JSON lines.
dataset remove; datasets:remove; 349; Remove a dataset, and the pins that nobody else owns.
dataset derive; derive:derive; 36789; Write rows with what they lack and can be computed.
dataset formats; datasets:formats; 39; List the dataset formats.
environment import; environments:add; 39; Keep recipes of a TOML file.
environment build; environments:build; 346789; Build environments of instances, keys or a dataset.
environment list; environments:list_all; 39; List environments and failed builds.
environment show; environments:show; 349; Show an environment, or why its build failed.
environment log; environments:log; 349; Print what a build printed.
environment remove; environments:remove; 3459; Remove environments that no checkout uses.
instance list; datasets:list_instances; 349; List the ids of instances.
instance show; datasets:show_instance; 3459; Show one instance.
pin; mirrors:pin; 34689; Keep a commit of a mirror alive.
unpin; mirrors:unpin; 349; Remove one of your pins.
pins; mirrors:pins; 349; List the pins of a mirror, or of all.
audit; mirrors:audit; 34789; Prove that every recorded commit can be served.
heal; mirrors:heal; 346789; Repair mirrors at object level.
checkout; checkouts:checkout; 346789; Lease a working tree; prints its path.
reset; checkouts:reset; 345789; Reset a checkout, move it to another instance or to a snapshot.
fork; checkouts:fork; 345789; Lease another tree with a checkout's content; prints its path.
snapshot; checkouts:snapshot; 34579; Keep a checkout's content under a name; prints the name.
snapshots; checkouts:snapshots; 349; List the snapshots of a checkout.
save; checkouts:save; 34579; Keep a checkout's changes as a prepared layer for others.
layers; checkouts:layers; 34579; List or remove prepared layers.
diff; checkouts:diff; 3479; Print what changed since the base commit, as a patch.
apply; checkouts:apply; 3459; Apply a patch to a checkout.
restore; mirrors:restore; 345789; Bring files into a checkout, or mirrors from the store.
grade; checkouts:grade; 3456789; Lease a grader's tree with an agent's change and the tests.
attach; checkouts:attach; 34579; Make a checkout visible in a mount namespace, at any path.
release; checkouts:release; 3459; Release checkouts.
renew; checkouts:renew; 349; Move the deadline of a checkout.
checkouts; checkouts:list_all; 39; List the held checkouts.
receipt; receipts:receipt; 345789; Print what a checkout is and how that was proven, or verify that.
exec; execute:execute; 346789; Run a command in a sandbox that shows a checkout.
verify-seal; local:verify_seal; 3478; Prove that a repository shows nothing after a commit.
rehearse; rehearse:rehearse; 3456789; Try every instance: checkout, seal, patches and back, reset.
fleet; status:fleet; 39; Show the daemons that share mirrors with this one.
du; status:du; 379; Show what is on disk, shared, and only a cache.
gc; status:gc; 379; Drop what is only a cache and not in use.
refs log; mirrors:refs_log; 349; List the records of a mirror's ref history.
refs diff; mirrors:refs_diff; 349; Show what changed between two records.
refs restore; mirrors:refs_restore; 34579; Put a mirror's refs back to a record.
bundle create; mirrors:bundle; 34789; Write a mirror with everything known about it into one file.
bundle import; mirrors:bundle_import; 345789; Make a mirror from a bundle, or add a bundle to one.
operations list; operations:list_all; 39; List operations.
operations show; operations:show; 349; Show one operation.
operations watch; operations:watch; 3456789; Print an operation's progress until it ends.
operations wait; operations:wait; 3456789; Wait until an operation ends.
operations cancel; operations:cancel; 349; Cancel an operation.
doctor; local:doctor; 7; Report what this host can and cannot do.
support-bundle; support:support_bundle; 57; Write what a bug report needs into one file.
service install; local:install; 357; Set up units, users and directories, and start the daemon.
service uninstall; local:uninstall; 37; Stop the daemon and remove its units.
reload; status:reload; 39; Have the daemon read its configuration again.
events; status:events; 39; Print recent events; --follow prints new ones.
config check; local:config_check; ; Check a configuration file.
config show; local:config_show; ; Print the configuration in effect, defaults included.
"""


def _iter_verbs() -> Iterable[Verb]:
    for line in _TABLE.strip().splitlines():
        name, at, ends, summary = line.split("; ", 3)
        yield Verb(name, at, tuple(map(int, ends)), summary)


VERBS = tuple(_iter_verbs())


def exit_lines(statuses: Iterable[int]) -> str:
    """The meaning of each status, one per line."""
    return "\n".join(f"  {status}  {EXIT_STATUSES[status]}" for status in statuses)
