"""SWE-bench, its Lite and Verified subsets, and SWE-agent's JSON arrays of the same rows.

The environment setup commit is a second pin. FAIL_TO_PASS and PASS_TO_PASS are strings holding JSON in the published files, lists
in SWE-agent's.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ..fields import Fields
from .generic import environment, row_of


def normalise(fields: Fields) -> InstanceRow:
    return row_of(fields, further=environment(fields))
