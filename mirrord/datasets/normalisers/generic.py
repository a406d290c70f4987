"""The shape that the SWE-bench family shares: repo, base_commit, patch, test_patch, two lists of tests.

Also a format of its own, for files that have the shape and are of no format we know. A column that holds a further commit in a
way nobody described cannot be found here, so a format that has one needs its own normaliser.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ...model import CommitId, CommitRole, Direction
from ..fields import Fields

Commits = tuple[tuple[CommitId, CommitRole], ...]


def normalise(fields: Fields) -> InstanceRow:
    return row_of(fields, further=())


def row_of(
    fields: Fields, *, further: Commits, direction: Direction = Direction.FORWARD
) -> InstanceRow:
    """The row by its common columns, with `further` commits beside the base commit."""
    base = fields.commit("base_commit")
    return InstanceRow(
        id=fields.instance_id(),
        dataset="",
        mirror=fields.mirror(),
        base_commit=base,
        direction=direction,
        commits=((base, CommitRole.BASE), *further),
        patch=fields.patch("patch"),
        test_patch=fields.patch("test_patch"),
        fail_to_pass=tests(fields, "FAIL_TO_PASS"),
        pass_to_pass=tests(fields, "PASS_TO_PASS"),
    )


def tests(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of tests, whose column some formats write in lower case."""
    if name in fields.row or name.lower() not in fields.row:
        return fields.names(name)
    return fields.names(name.lower())


def environment(fields: Fields) -> Commits:
    """The commit that the environment is built at, where the row has one."""
    if not fields.has("environment_setup_commit"):
        fields.fired("environment_setup_commit: none")
        return ()
    return ((fields.commit("environment_setup_commit"), CommitRole.ENVIRONMENT),)
