"""Check that everything a [[credential]] names can be read; no upstream is asked."""

import os
from functools import partial

import anyio

from ..config import Settings
from ..errors import MirrordError
from ..mirrors.upstreams.credentials import Credentials
from .checks import Result


def credentials(settings: Settings) -> Result:
    """Try each entry. Its commands run, and a GitHub App asks for a token."""
    tried = Credentials(lambda: settings)
    faults = []
    # systemd gives its credentials to the daemon alone
    daemons = (
        []
        if "CREDENTIALS_DIRECTORY" in os.environ
        else [entry for entry in settings.credential if entry.systemd]
    )
    for entry in settings.credential:
        if entry in daemons:
            continue
        try:
            anyio.run(partial(tried.check, entry))
        except MirrordError as error:
            faults.append(error)
    if faults:
        detail = "; ".join(error.message for error in faults)
        return "fail", detail, "; ".join(error.hint or "" for error in faults)
    count = len(settings.credential) - len(daemons)
    fact = f"{count} can be read" if settings.credential else "none configured"
    return "ok", f"{fact}, {len(daemons)} by the daemon alone" if daemons else fact, ""
