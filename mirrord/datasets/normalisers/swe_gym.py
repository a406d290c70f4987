"""SWE-Gym: the columns of SWE-bench without an environment setup commit; tests are lists, or strings holding JSON.

Copies of it add columns with scripts, which are not read.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ..fields import Fields
from .generic import row_of


def normalise(fields: Fields) -> InstanceRow:
    return row_of(fields, further=())
