"""What may stand behind the `?` of each path, one class each; unknown names are refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..model import View
from ..protocol import Repo

_Name = Annotated[str, Field(min_length=1, max_length=100)]
_RefRecord = Annotated[
    str,
    Field(min_length=1, max_length=100, description="a ref record: its id, or a time in ISO 8601"),
]


class Query(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NoQuery(Query):
    pass


class RefsDiffQuery(Query):
    a: _RefRecord
    b: _RefRecord


class BundleQuery(Query):
    since: _RefRecord | None = None


class ImportBundleQuery(Query):
    mirror: Repo | None = None


class PinsQuery(Query):
    mirror: Repo | None = None


class UnpinQuery(Query):
    owner: (
        Annotated[
            str,
            Field(max_length=200, description="dataset/NAME or person/UID; administrators only"),
        ]
        | None
    ) = None


class ImportQuery(Query):
    filename: (
        Annotated[
            str,
            Field(
                min_length=1, max_length=255, description="what faults are told of; default: name"
            ),
        ]
        | None
    ) = None
    name: (
        Annotated[_Name, Field(description="of the dataset; default: filename without its endings")]
        | None
    ) = None
    format: _Name | None = None


class InstancesQuery(Query):
    dataset: _Name | None = None


class InstanceQuery(Query):
    view: View = View.AGENT
    dataset: str | None = None


class AuditsQuery(Query):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class ApplyQuery(Query):
    reverse: bool = False
    named: Annotated[str, Field(pattern="^@(patch|test_patch)$")] | None = None


class EventsQuery(Query):
    after: (
        Annotated[str, Field(max_length=64, description="as Last-Event-ID: BOOT:ID, or ID")] | None
    ) = None
    follow: bool = True
