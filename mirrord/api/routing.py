"""From a method and a path to a row of the table. Paths without parameters, which are the hot ones, cost one look-up.

HEAD is answered as GET is wherever that answers with JSON; streams and patches are not made to be thrown away.

Matches the path as it was sent and unquotes each parameter by itself, so that a parameter may hold any character, even a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

from ..errors import NotFoundError
from .problems import MethodNotAllowedError
from .table import Endpoint

_HINT = "GET /v1/openapi.json lists all"


class Routes:
    """Finds endpoints. Raises NotFoundError and MethodNotAllowedError."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Endpoint]]] = {}
        for endpoint in endpoints:
            self._add(endpoint)

    def find(self, method: str, raw_path: bytes) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint, and the parameters of the path."""
        path = raw_path.decode("ascii", "replace")
        if methods := self._exact.get(path):
            return _of_method(methods, method), {}
        for pattern, methods in self._patterns.values():
            if found := pattern.fullmatch(path):
                return _of_method(methods, method), dict(_iter_unquoted(found.groupdict()))
        raise NotFoundError("cannot answer the request: no such path", hint=_HINT)

    def _add(self, endpoint: Endpoint) -> None:
        methods = (
            [endpoint.method, "HEAD"]
            if endpoint.method == "GET" and endpoint.model
            else [endpoint.method]
        )
        rows = dict.fromkeys(methods, endpoint)
        if not endpoint.parameters:
            self._exact.setdefault(endpoint.path, {}).update(rows)
            return
        pattern = re.compile(
            re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", endpoint.path.replace(".", r"\."))
        )
        self._patterns.setdefault(endpoint.path, (pattern, {}))[1].update(rows)


def _of_method(methods: dict[str, Endpoint], method: str) -> Endpoint:
    if endpoint := methods.get(method):
        return endpoint
    allowed = ", ".join(sorted(methods))
    raise MethodNotAllowedError(
        f"cannot answer the request: the path takes {allowed}, not {method}",
        hint=_HINT,
        allow=allowed,
    )


def _iter_unquoted(parameters: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in parameters.items():
        yield name, unquote_to_bytes(value).decode("utf-8", "surrogateescape")
