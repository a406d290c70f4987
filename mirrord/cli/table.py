"""The table of verbs: name, function, exit statuses and summary."""

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
    "mirror": "Manage mirrors, complete copies of upstream repositories.",
    "credential": "Check what upstreams are asked with.",
    "environment": "Build and manage environments that instances run in.",
    "dataset": "Import and manage datasets of instances.",
    "instance": "List and show instances.",
    "pin": "Keep commits alive that no dataset records.",
    "snapshot": "Save states of a checkout, to go back to or to fork.",
    "layer": "Save changes of a checkout for other checkouts.",
    "ref": "Show and restore the ref history of a mirror.",
    "operation": "List, await and cancel background work of the daemon.",
    "bundle": "Write and read mirrors as single files.",
    "config": "Check, show and reload the configuration.",
    "service": "Install and remove the systemd service.",
}


class Verb(NamedTuple):
    """`at` is module:function in `verbs`; `ends` are exit statuses besides 0, 1 and 2."""

    name: str
    at: str
    ends: tuple[int, ...]
    summary: str


# name; function; exit statuses besides 0, 1 and 2, as digits; summary
_TABLE = """
serve; status:serve; 357; Run the daemon in the foreground.
status; status:status; 39; Show the state of the daemon, and what needs attention.
top; top:top; 39; Show requests, workers and operations of the daemon, live.
mirror add; mirrors:add; 35679; Add mirrors and sync them.
mirror set-url; mirrors:set_url; 345679; Follow another upstream.
mirror list; mirrors:list_all; 39; List all mirrors.
mirror show; mirrors:show; 349; Show one mirror.
mirror sync; mirrors:sync; 34679; Sync mirrors with upstream.
mirror remove; mirrors:remove; 3459; Remove a mirror without pins and checkouts.
mirror restore; mirrors:restore_mirrors; 345789; Restore mirrors, pins and rows from the store.
credential check; mirrors:check_credential; 369; Try the credential of a URL on its upstream.
dataset import; datasets:add; 36789; Import a dataset; mirror its repositories and pin its commits.
dataset list; datasets:list_all; 39; List all datasets.
dataset show; datasets:show; 349; Show a dataset, its bad rows and its unpinned commits.
dataset prepare; datasets:prepare; 346789; Build the templates of a dataset's instances now.
dataset diff; datasets:diff; 349; Show which rows differ between two datasets.
dataset export; datasets:export; 349; Print the rows as canonical JSON lines.
dataset remove; datasets:remove; 349; Remove a dataset and its pins.
dataset derive; derive:derive; 36789; Compute missing columns of a dataset's rows.
dataset formats; datasets:formats; 39; List the dataset formats.
environment import; environments:add; 39; Import recipes from a TOML file.
environment build; environments:build; 346789; Build environments of instances, keys or a dataset.
environment list; environments:list_all; 39; List environments and failed builds.
environment show; environments:show; 349; Show an environment, or why its build failed.
environment log; environments:log; 349; Print the log of a build.
environment remove; environments:remove; 3459; Remove environments that no checkout uses.
instance list; datasets:list_instances; 349; List the ids of instances.
instance show; datasets:show_instance; 3459; Show one instance.
pin add; mirrors:pin; 34689; Pin a commit of a mirror.
pin list; mirrors:list_pins; 349; List the pins of a mirror, or of all.
pin remove; mirrors:unpin; 349; Remove a pin.
audit; upkeep:audit; 34789; Check that every recorded commit can be served.
heal; upkeep:heal; 346789; Repair missing and damaged objects of mirrors.
checkout; checkouts:checkout; 346789; Lease a working tree and print its path.
reset; checkouts:reset; 345789; Reset a checkout, or move it to another instance.
fork; checkouts:fork; 345789; Lease a copy of a checkout and print its path.
snapshot create; checkouts:create_snapshot; 34579; Save the content of a checkout under a name.
snapshot list; checkouts:list_snapshots; 349; List the snapshots of a checkout.
snapshot remove; checkouts:remove_snapshot; 349; Remove a snapshot.
layer save; checkouts:save_layer; 34579; Save the changes of a checkout as a prepared layer.
layer list; checkouts:list_layers; 349; List prepared layers.
layer remove; checkouts:remove_layers; 3459; Remove prepared layers that no checkout uses.
diff; checkouts:diff; 3479; Print the changes since the base commit, as a patch.
apply; checkouts:apply; 3459; Apply a patch to a checkout.
restore; checkouts:restore; 34579; Restore files of a pinned commit in a checkout.
grade; grades:grade; 3456789; Lease a tree with an agent's change and the tests.
attach; checkouts:attach; 34579; Attach a checkout to a path of a mount namespace.
release; checkouts:release; 3459; Release checkouts.
renew; checkouts:renew; 349; Renew the lease of a checkout.
checkouts; checkouts:list_all; 39; List held checkouts.
receipt; receipts:receipt; 345789; Print or verify the receipt of a checkout.
exec; execute:execute; 346789; Run a command in a sandbox that shows a checkout.
verify-seal; local:verify_seal; 3478; Prove that a repository has nothing newer than a commit.
rehearse; rehearse:rehearse; 3456789; Test instances: checkout, seal, patches, reset.
du; upkeep:du; 379; Show disk usage, and how much of it gc can free.
gc; upkeep:gc; 379; Remove caches that are not in use.
ref log; mirrors:log_refs; 349; List the records of a mirror's ref history.
ref diff; mirrors:diff_refs; 349; Show what changed between two records.
ref restore; mirrors:restore_refs; 34579; Restore a mirror's refs from a record.
bundle create; mirrors:create_bundle; 34789; Write a mirror, its pins and its records into one file.
bundle import; mirrors:import_bundle; 345789; Create a mirror from a bundle, or merge it into one.
operation list; operations:list_all; 39; List operations.
operation show; operations:show; 349; Show one operation.
operation wait; operations:wait; 3456789; Wait until an operation ends.
operation cancel; operations:cancel; 349; Cancel an operation.
doctor; local:doctor; 7; Check what this host can and cannot do for mirrord.
support-bundle; support:support_bundle; 57; Write diagnostics for a bug report into one file.
service install; local:install; 357; Install units, users and directories, and start the daemon.
service uninstall; local:uninstall; 37; Stop the daemon and remove its units.
events; status:events; 39; Print recent events; with --follow, also new ones.
config check; local:config_check; ; Check a configuration file.
config show; local:config_show; ; Print the configuration in effect, defaults included.
config reload; status:reload; 39; Reload the daemon's configuration.
"""


def _iter_verbs() -> Iterable[Verb]:
    for line in _TABLE.strip().splitlines():
        name, at, ends, summary = line.split("; ", 3)
        yield Verb(name, at, tuple(map(int, ends)), summary)


VERBS = tuple(_iter_verbs())


def exit_lines(statuses: Iterable[int]) -> str:
    return "\n".join(f"  {status}  {EXIT_STATUSES[status]}" for status in statuses)
