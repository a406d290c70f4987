"""SWE-bench Multimodal: repositories in mixed case; test patches hold stubs of binary files, kept byte for byte.

`image_assets` names URLs of pictures, which are no part of the code: it only tells the format.
"""

from __future__ import annotations

from ...catalog import InstanceRow
from ..fields import Fields
from .generic import environment, row_of


def normalise(fields: Fields) -> InstanceRow:
    return row_of(
        fields, further=environment(fields) if "environment_setup_commit" in fields.row else ()
    )
