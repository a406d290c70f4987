"""What every message is made from: the two kinds, the limits that requests share, and how an error looks.

Requests refuse unknown members; answers ignore them, so that an older client reads a newer daemon.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

API = "/v1"
Repo = Annotated[str, Field(min_length=1, max_length=400)]
Text = Annotated[str, Field(max_length=2000)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Problem(BaseModel):
    """RFC 9457. `code` is stable; further members are the facts of the error."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None
