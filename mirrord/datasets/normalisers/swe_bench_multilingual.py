"""SWE-bench Multilingual: lists of tests, repositories in lower case, no environment setup commit.

A mirror keeps the first spelling seen, so a repository that another dataset spells with capitals is the same mirror.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ..fields import Fields
from .generic import row_of


def normalise(fields: Fields) -> InstanceRow:
    return row_of(fields, further=())
