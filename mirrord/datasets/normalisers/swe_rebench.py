"""SWE-rebench and SWE-bench-extra: as SWE-bench, with FAIL_TO_FAIL, PASS_TO_FAIL and an install_config.

The environment setup commit is a second pin; some rows leave it empty.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ..fields import Fields
from .generic import environment, row_of


def normalise(fields: Fields) -> InstanceRow:
    return row_of(fields, further=environment(fields))
