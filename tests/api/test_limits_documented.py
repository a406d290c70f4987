"""The table of limits in docs/users.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirrord.api import connections, server
from mirrord.api import request as bodies
from mirrord.config.settings import CheckoutSettings
from mirrord.datasets import elements, fields, readers
from mirrord.git.objects import trees as bounds
from mirrord.host.peers import Role
from mirrord.jobs import events, operations
from mirrord.model import TREE_DEPTH_LIMIT, TREE_PATH_LIMIT_BYTES
from mirrord.patches import diff, worktree
from mirrord.workers import gate
from mirrord.workers.pool import Workers

MIB, GIB = 1024**2, 1024**3
CHECKOUTS = CheckoutSettings()

BOUNDS = [
    ("a column mapping", [f"{fields.MAPPING_LIMIT_BYTES // 1024} KiB"]),
    (
        "connections of members",
        [f"{connections.CONNECTIONS_OF[Role.MEMBER]:,}", f"{connections.MAX_CONNECTIONS:,}"],
    ),
    ("connections of members", [f"{connections.RESERVED_CONNECTIONS} of them"]),
    (
        "connections of checkout owners",
        [f"{connections.CONNECTIONS_OF[Role.OWNER]}; {connections.CONNECTIONS_OF[Role.STRANGER]}"],
    ),
    ("connections of checkout owners", [f"strangers: {connections.ALL_STRANGERS_CONNECTIONS}"]),
    ("requests, unanswered", [f"{gate.WORKING} of them", f"{gate.WAITING:,} waiting"]),
    ("time of a diff", [f"{CHECKOUTS.diff_timeout.total_seconds() / 60:g} minute"]),
    (
        "a fork or snapshot",
        [
            f"{CHECKOUTS.copy_files:,} paths",
            f"{CHECKOUTS.copy_bytes // GIB} GiB",
            f"{CHECKOUTS.copy_timeout.total_seconds() / 60:g} minutes",
        ],
    ),
    (
        "operations that members start",
        [f"{operations.RUNNING_OF_MEMBER} running", f"last {operations.KEPT_OF_MEMBER} are"],
    ),
    ("event followers", [f"| {events.FOLLOWERS_OF_USER} | {events.FOLLOWERS} |"]),
    (
        "bytes of bodies",
        [f"{bodies.USER_BODIES_BYTES // MIB} MiB", f"{bodies.ALL_BODIES_BYTES // GIB} GiB"],
    ),
    (
        "one body",
        [
            f"JSON {bodies.JSON_LIMIT_BYTES // MIB} MiB",
            f"patch {bodies.PATCH_LIMIT_BYTES // MIB} MiB",
        ],
    ),
    (
        "one body",
        [
            f"dataset {bodies.DATASET_LIMIT_BYTES // GIB} GiB",
            f"bundle {bodies.BUNDLE_LIMIT_BYTES // GIB} GiB",
        ],
    ),
    (
        "a request's head",
        [f"{server.HEAD_LIMIT_BYTES // 1024} KiB", f"{server.HEAD_TIMEOUT_S:g} s"],
    ),
    ("silence in a body", [f"{bodies.SILENCE_LIMIT_S:g} s; {server.STALLED_READER_S:g} s"]),
    (
        "the tree of a commit",
        [f"{bounds.ENTRIES_LIMIT:,} entries", f"{bounds.TREE_LIMIT_BYTES // GIB} GiB"],
    ),
    (
        "the tree of a commit",
        [f"files of {bounds.FILE_LIMIT_BYTES // GIB} GiB", f"{TREE_DEPTH_LIMIT} directories"],
    ),
    ("the tree of a commit", [f"{TREE_PATH_LIMIT_BYTES:,} bytes"]),
    (
        "a patch in an answer",
        [f"{diff.PATCH_LIMIT_BYTES // MIB} MiB", f"{diff.FILES_LIMIT:,} new files"],
    ),
    ("a patch in an answer", [f"{worktree.BYTES_LIMIT // MIB} MiB changed"]),
    (
        "unpacked size of a dataset file",
        [f"{readers.UNPACKED_FREE_BYTES // MIB} MiB plus {readers.UNPACKED_RATIO} times"],
    ),
    (
        "unpacked size of a dataset file",
        [
            f"{readers.UNPACKED_LIMIT_BYTES // GIB} GiB",
            f"{elements.ELEMENT_LIMIT_BYTES // MIB} MiB",
        ],
    ),
    ("unpacked size of a dataset file", [f"{elements.DEPTH_LIMIT:,} deep"]),
]


@pytest.mark.parametrize(("row", "words"), BOUNDS)
def test_a_bound_is_documented_as_it_is(row: str, words: list[str]) -> None:
    lines = (Path(__file__).parents[2] / "docs/users.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {row}")]
    assert [word for word in words if word not in line] == []


def test_the_turns_of_workers_are_documented_as_they_are() -> None:
    workers = Workers()
    for queue in (workers._short, workers._long):
        assert (queue._each, queue._background, queue._most) == (2, 2, 10)
