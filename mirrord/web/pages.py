"""The routes of the web page, and rendering: paths to templates and the facts they show."""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import anyio.to_thread
from jinja2 import Environment, PackageLoader, StrictUndefined

from .. import __version__
from ..engine.engine import Engine
from ..errors import NotFoundError, UsageError
from ..model import utc_now
from ..quoting import legible, quote_name
from ..units import counted
from . import figures, overview, records, views
from .figures import duration

Facts = dict[str, Any]
# the page's refresh is a visitor's value: these and no other
_RENEWALS_S = {"5", "10", "60"}


class Route(NamedTuple):
    """One kind of page. Routes with a `title` are in the navigation."""

    pattern: re.Pattern[str]
    template: str
    gather: Callable[..., Awaitable[Facts]]
    title: str = ""


def _route(path: str, gather: Callable[..., Awaitable[Facts]], title: str = "") -> Route:
    name = gather.__name__.removeprefix("show_")
    return Route(re.compile(path), f"{name}.html", gather, title)


ROUTES = (
    _route("/", overview.show_overview, "Overview"),
    _route("/mirrors", views.show_mirrors, "Mirrors"),
    _route("/mirrors/(?P<name>[^/]{1,300})", views.show_mirror),
    _route("/datasets", views.show_datasets, "Datasets"),
    _route("/datasets/(?P<name>[^/]{1,300})", views.show_dataset),
    _route("/checkouts", views.show_checkouts, "Checkouts"),
    _route("/environments", views.show_environments, "Environments"),
    _route("/audits", records.show_audits, "Audits"),
    _route("/audits/(?P<identity>[^/]{1,100})", records.show_audit),
    _route("/reports", records.show_reports, "Reports"),
    _route("/reports/(?P<identity>[^/]{1,100})", records.show_report),
    _route("/receipts", records.show_receipts, "Receipts"),
    _route("/receipts/(?P<identity>[^/]{1,100})", records.show_receipt),
    _route("/activity", overview.show_activity, "Activity"),
    _route("/fleet", views.show_fleet, "Fleet"),
)


class Pages:
    """Renders pages. `files` are static: media type and bytes by path."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        package = files(__package__)
        self.files = {
            "/style.css": ("text/css; charset=utf-8", (package / "style.css").read_bytes()),
            "/icon.svg": ("image/svg+xml", (package / "icon.svg").read_bytes()),
        }
        self._environment = Environment(
            loader=PackageLoader(__package__),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalize,
            # else jinja2 asks the file system at each page whether the template has changed
            auto_reload=False,
        )
        self._environment.filters.update(
            size=figures.size, duration=duration, seconds=figures.seconds, counted=counted,
            owner=figures.owner,
            path=lambda text: quote(text, safe=""), number=lambda value: f"{value:,}",
            name=quote_name,
        )  # fmt: skip
        # a template that is broken fails the opening of the page, not a visit
        for name in self._environment.list_templates():
            self._environment.get_template(name)

    async def render(self, path: str, values: dict[str, str]) -> tuple[int, str]:
        """Return the status and the HTML of a page, or of a page that says "not found"."""
        for route in ROUTES:
            if match := route.pattern.fullmatch(path):
                break
        else:
            return 404, await self._render("problem.html", path, values, {"what": "page"})
        try:
            context = await route.gather(self._engine, values, **match.groupdict())
        except (NotFoundError, UsageError):  # nothing has a name that is not allowed
            kind = path.split("/")[1].removesuffix("s")
            return 404, await self._render("problem.html", path, values, {"what": kind})
        return 200, await self._render(route.template, path, values, context)

    async def _render(
        self, template: str, path: str, values: dict[str, str], context: Facts
    ) -> str:
        renew = values.get("renew", "")
        given = defaultdict(str, values)

        def link(**more: object) -> str:
            """Return the URL of this page with other parameters; None removes one."""
            query = {**values, **more}
            return f"{path}?{urlencode({k: v for k, v in query.items() if v not in (None, '')})}"

        def age(then: datetime | None) -> str:
            return duration((context["now"] - then).total_seconds()) if then else "never"

        context = {
            "now": utc_now(), "version": __version__, "path": path, "link": link, "age": age,
            "given": given, "renew": renew if renew in _RENEWALS_S else "",
            "navigation": [
                (route.pattern.pattern, route.title)
                for route in ROUTES
                if route.title and (self._engine.fleet or route.gather is not views.show_fleet)
            ],
            **context,
        }  # fmt: skip
        source = self._environment.get_template(template)
        return await anyio.to_thread.run_sync(lambda: source.render(context))


def _finalize(value: Any) -> Any:
    """Escape characters that hide or reorder text; templates escape HTML."""
    # not isinstance: a Markup is escaped already
    return legible(value) if type(value) is str else value
