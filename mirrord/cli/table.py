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
    "instance": "Show instances.",
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
    """`at` is module:function in `verbs`; `ends` are exit statuses besides 0, 1 and 2.

    `section` is a heading of `mirrord --help`; `example` are words after `mirrord`.
    """

    name: str
    at: str
    ends: tuple[int, ...]
    summary: str
    section: str
    example: str


# after a heading, of each verb: name; function; exit statuses besides 0, 1 and 2, as digits;
# summary; and an example
_TABLE = """
# Use
checkout; checkouts:checkout; 346789; Lease a working tree and print its path.
  checkout psf__requests-2317
exec; execute:execute; 346789; Run a command in a sandbox that shows a checkout.
  exec psf__requests-2317 -- python -m pytest -q
diff; checkouts:diff; 3479; Print the changes since the base commit, as a patch.
  diff . --stat
apply; checkouts:apply; 3459; Apply a patch to a checkout.
  apply . fix.patch
restore; checkouts:restore; 34579; Restore files of a pinned commit in a checkout.
  restore . --commit gold src/module.py
reset; checkouts:reset; 345789; Reset a checkout, or move it to another instance.
  reset .
renew; checkouts:renew; 349; Renew the lease of a checkout.
  renew . --ttl 4h
release; checkouts:release; 3459; Release checkouts.
  release --all
checkouts; checkouts:list_all; 39; List held checkouts.
  checkouts
fork; checkouts:fork; 345789; Lease a copy of a checkout and print its path.
  fork . --from s1
snapshot create; checkouts:create_snapshot; 34579; Save the content of a checkout under a name.
  snapshot create . before
snapshot list; checkouts:list_snapshots; 349; List the snapshots of a checkout.
  snapshot list .
snapshot remove; checkouts:remove_snapshot; 349; Remove a snapshot.
  snapshot remove . before
layer save; checkouts:save_layer; 34579; Save the changes of a checkout as a prepared layer.
  layer save . tools
layer list; checkouts:list_layers; 349; List prepared layers.
  layer list psf/requests
layer remove; checkouts:remove_layers; 3459; Remove prepared layers that no checkout uses.
  layer remove 4f1c0b7a9d2e6358
grade; grades:grade; 3456789; Lease a tree with an agent's change and the tests.
  grade psf__requests-2317 --patch fix.patch
rehearse; rehearse:rehearse; 3456789; Test instances: checkout, seal, patches, reset.
  rehearse --dataset verified --jobs 16
# Data
dataset import; datasets:add; 36789; Import a dataset; mirror its repositories and pin its commits.
  dataset import verified.jsonl
dataset list; datasets:list_all; 39; List all datasets.
  dataset list
dataset show; datasets:show; 349; Show a dataset, its bad rows and its unpinned commits.
  dataset show verified --all
dataset diff; datasets:diff; 349; Show which rows differ between two datasets.
  dataset diff verified lite
dataset export; datasets:export; 349; Print the rows as canonical JSON lines.
  dataset export verified > rows.jsonl
dataset remove; datasets:remove; 349; Remove a dataset and its pins.
  dataset remove verified
dataset derive; derive:derive; 36789; Compute missing columns of a dataset's rows.
  dataset derive pulls.jsonl --output rows.jsonl
dataset formats; datasets:formats; 39; List the dataset formats.
  dataset formats
instance show; datasets:show_instance; 3459; Show one instance.
  instance show psf__requests-2317
mirror add; mirrors:add; 35679; Add mirrors and sync them.
  mirror add psf/requests pallets/flask
mirror list; mirrors:list_all; 39; List all mirrors.
  mirror list
mirror show; mirrors:show; 349; Show one mirror.
  mirror show psf/requests
mirror sync; mirrors:sync; 34679; Sync mirrors with upstream.
  mirror sync psf/requests
mirror set-url; mirrors:set_url; 345679; Follow another upstream.
  mirror set-url psf/requests https://git.example.com/psf/requests.git
mirror remove; mirrors:remove; 3459; Remove a mirror without pins and checkouts.
  mirror remove psf/requests
mirror restore; mirrors:restore_mirrors; 345789; Restore mirrors, pins and rows from the store.
  mirror restore --from-store
environment build; environments:build; 346789; Build environments of instances, keys or a dataset.
  environment build --dataset verified
environment import; environments:add; 346789; Import an image, or recipes from a TOML file.
  environment import docker://debian:12 --key debian
environment list; environments:list_all; 39; List environments and failed builds.
  environment list
environment show; environments:show; 349; Show an environment, or why its build failed.
  environment show requests-2.3
environment log; environments:log; 349; Print the log of a build.
  environment log requests-2.3
environment remove; environments:remove; 3459; Remove environments that no checkout uses.
  environment remove requests-2.3
pin add; mirrors:pin; 34689; Pin a commit of a mirror.
  pin add psf/requests 22623bd8c265b78b161542663ee980738441c307 --reason paper
pin list; mirrors:list_pins; 349; List the pins of a mirror, or of all.
  pin list psf/requests
pin remove; mirrors:unpin; 349; Remove a pin.
  pin remove psf/requests 22623bd8c265b78b161542663ee980738441c307
ref log; mirrors:log_refs; 349; List the records of a mirror's ref history.
  ref log psf/requests
ref diff; mirrors:diff_refs; 349; Show what changed between two records.
  ref diff psf/requests 2026-01-01T00:00:00Z latest
ref restore; mirrors:restore_refs; 34579; Restore a mirror's refs from a record.
  ref restore psf/requests 2026-01-01T00:00:00Z
bundle create; mirrors:create_bundle; 34789; Write a mirror, its pins and its records into one file.
  bundle create psf/requests requests.bundle
bundle import; mirrors:import_bundle; 345789; Create a mirror from a bundle, or merge it into one.
  bundle import requests.bundle
# Operate
serve; status:serve; 357; Run the daemon, in the foreground or detached.
  serve --config config.toml
status; status:status; 389; Show the daemon's state and problems, or its work, live.
  status --problems
doctor; local:doctor; 57; Check what this host can and cannot do for mirrord.
  doctor
audit; upkeep:audit; 34789; Check that every recorded commit can be served.
  audit --dataset verified
heal; upkeep:heal; 346789; Repair missing and damaged objects of mirrors.
  heal psf/requests
du; upkeep:du; 379; Show disk usage, and how much of it gc can free.
  du --verbose
gc; upkeep:gc; 379; Remove caches that are not in use.
  gc --dry-run
operation list; status:list_operations; 39; List operations.
  operation list --running
operation show; status:show_operation; 349; Show one operation.
  operation show 3c5b1f0a
operation wait; status:wait_operation; 3456789; Wait until an operation ends.
  operation wait 3c5b1f0a
operation cancel; status:cancel_operation; 349; Cancel an operation.
  operation cancel 3c5b1f0a
events; status:events; 39; Print recent events; with --follow, also new ones.
  events --follow
config check; local:config_check; ; Check a configuration file.
  config check config.toml
config show; local:config_show; ; Print the configuration in effect, defaults included.
  config show
config reload; status:reload; 39; Reload the daemon's configuration.
  config reload
service install; local:install; 2357; Install units, users and directories, and start the daemon.
  service install --user
service uninstall; local:uninstall; 237; Stop the daemon and remove its units.
  service uninstall --dry-run
credential check; mirrors:check_credential; 369; Try the credential of a URL on its upstream.
  credential check https://git.example.com/team/project.git
# Rare
attach; checkouts:attach; 34579; Attach a checkout to a path of a mount namespace.
  attach . /testbed
enter; enter:enter; 349; Run a command in the namespaces of a user's daemon.
  enter -- python harness.py
receipt; receipts:receipt; 345789; Print or verify the receipt of a checkout.
  receipt . --sign ~/.ssh/id_ed25519
verify-seal; local:verify_seal; 3478; Prove that a repository has nothing newer than a commit.
  verify-seal . --base 22623bd8c265b78b161542663ee980738441c307
completion; local:completion; ; Print a script that lets a shell complete words.
  completion bash > ~/.local/share/bash-completion/completions/mirrord
"""

# what `mirrord --help` begins with: the whole of a session, without an answer
LOOP = (
    ("dataset import verified.jsonl", "mirror what its instances need"),
    ("checkout psf__requests-2317", "print a working tree's path"),
    ("exec psf__requests-2317 -- pytest -q", "run a command in a sandbox"),
    ("diff PATH", "print what changed, as a patch"),
    ("release PATH", "give it back"),
)


def _iter_verbs() -> Iterable[Verb]:
    section, lines = "", iter(_TABLE.strip().splitlines())
    for line in lines:
        if line.startswith("# "):
            section = line.removeprefix("# ")
            continue
        name, function, ends, summary = line.split("; ", 3)
        yield Verb(name, function, tuple(map(int, ends)), summary, section, next(lines).strip())


VERBS = tuple(_iter_verbs())
SECTIONS = tuple(dict.fromkeys(verb.section for verb in VERBS))


def exit_lines(statuses: Iterable[int]) -> str:
    return "\n".join(f"  {status}  {EXIT_STATUSES[status]}" for status in statuses)
