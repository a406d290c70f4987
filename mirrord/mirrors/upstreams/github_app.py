"""Tokens of GitHub Apps: asked for with a signed claim, remembered until shortly before their end.

https://docs.github.com/apps/creating-github-apps/authenticating-with-a-github-app. The claim is
signed by `openssl`, which is installed wherever git can use TLS.
"""

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from anyio import to_thread

from ...config import AppSettings, CredentialSettings
from ...errors import CredentialUnusableError

_MARGIN_S = 300.0  # a token lives for an hour; a long fetch asks several times with one


class Run(Protocol):
    """Runs a program with some input, and returns what it prints."""

    def __call__(self, *argv: str, stdin: bytes) -> Awaitable[bytes]: ...


@dataclass(slots=True)
class Tokens:
    """Installation tokens by entry, with the times when they end."""

    _known: dict[CredentialSettings, tuple[str, float]] = field(default_factory=dict)

    async def get(self, entry: CredentialSettings, run: Run) -> str:
        token, end = self._known.get(entry, ("", 0.0))
        if end - _MARGIN_S > time.time():
            return token
        app = entry.github_app
        assert app is not None
        claim = await _claim(app, run)
        token, end = await to_thread.run_sync(_mint, entry, app, claim)
        self._known[entry] = token, end
        return token

    def forget(self, entry: CredentialSettings) -> None:
        """Drop the token of an entry: upstream refused it."""
        self._known.pop(entry, None)


async def _claim(app: AppSettings, run: Run) -> str:
    """Return a JWT that is valid for nine minutes; GitHub allows ten, and clocks differ."""
    now = int(time.time())
    claims = {"iat": now - 60, "exp": now + 540, "iss": str(app.id)}
    header = {"alg": "RS256", "typ": "JWT"}
    text = ".".join(_encode(json.dumps(part).encode()) for part in (header, claims))
    signature = await run(
        "openssl", "dgst", "-sha256", "-sign", str(app.key_file), stdin=text.encode()
    )
    return f"{text}.{_encode(signature)}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def api_of(entry: CredentialSettings, app: AppSettings) -> str:
    """Return the base of the API: that of github.com has a host of its own."""
    if app.api:
        return app.api.rstrip("/")
    parts = urlsplit(entry.url)
    return (
        "https://api.github.com"
        if parts.hostname == "github.com"
        else f"{parts.scheme}://{parts.netloc}/api/v3"
    )


def _mint(entry: CredentialSettings, app: AppSettings, claim: str) -> tuple[str, float]:
    api, number = api_of(entry, app), app.installation
    if number is None:
        owner = quote(app.owner or "", safe="")
        url = f"{api}/users/{owner}/installation"
        answer = _ask(entry, url, claim, "GET")
        if type(number := answer.get("id")) is not int:
            raise _refused(entry, url, "it names no installation")
    url = f"{api}/app/installations/{number}/access_tokens"
    answer = _ask(entry, url, claim, "POST")
    try:
        return str(answer["token"]), datetime.fromisoformat(answer["expires_at"]).timestamp()
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(entry, url, "it answers without token and expires_at") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow none: the claim would go along."""


# of connecting and of each read: urllib does not bound the whole answer
_TIMEOUT_S = 30.0
# a token comes in some kB; what answers instead may send for ever
_LONGEST_ANSWER = 1 << 20


def _ask(entry: CredentialSettings, url: str, claim: str, method: str) -> dict[str, Any]:
    context = ssl.create_default_context(cafile=entry.ca_file)
    if entry.client_cert:
        context.load_cert_chain(entry.client_cert, entry.client_key)
    handlers: list[urllib.request.BaseHandler] = [
        _NoRedirects(), urllib.request.HTTPSHandler(context=context)
    ]  # fmt: skip
    if entry.proxy:
        proxies = {"http": entry.proxy, "https": entry.proxy}
        handlers.append(urllib.request.ProxyHandler(proxies))
    headers = {
        "Authorization": f"Bearer {claim}",
        "Accept": "application/vnd.github+json",
        "User-Agent": "mirrord",
    }
    request = urllib.request.Request(url, method=method, headers=headers)  # noqa: S310 - http(s)
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read(_LONGEST_ANSWER))
        return dict(answer)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise _refused(entry, url, f"it answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
        raise _refused(entry, url, str(error)) from error


def _refused(entry: CredentialSettings, url: str, fact: str) -> CredentialUnusableError:
    app = entry.github_app
    assert app is not None
    return CredentialUnusableError(
        f"cannot use [[credential]] {entry.url}: no token from {url}: {fact}",
        hint=f"check that {app.key_file} is a present key of App {app.id}, that the App is"
        " installed there, and that this machine's clock is right",
        credential=entry.url,
    )
