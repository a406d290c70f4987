"""The database's clock, in milliseconds since 1970: the clocks of nodes differ by minutes."""

from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class clock_ms(FunctionElement[int]):  # noqa: N801 - a function of SQL
    """Milliseconds since 1970 by the database's clock."""

    type = sa.BigInteger()
    inherit_cache = True


@compiles(clock_ms, "postgresql")
def _now_of_postgresql(_element: Any, _compiler: Any, **_: Any) -> str:
    # now() is when the transaction began: a wait for a lock would count for nothing
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(clock_ms, "sqlite")
def _now_of_sqlite(_element: Any, _compiler: Any, **_: Any) -> str:
    # 2440587.5 is the Julian day of the beginning of 1970
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


def to_ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
