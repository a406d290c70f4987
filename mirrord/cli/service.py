"""`mirrord serve`, `reload` and `events`: the daemon itself."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

from .output import when
from .session import Option, Session, print_line

if TYPE_CHECKING:
    from ..protocol import Event


def serve(session: Session) -> None:
    """Stops on SIGTERM and SIGINT; reads its configuration again on SIGHUP."""
    named = [("--config", session.config), ("--socket", session.socket)]
    arguments = [word for option, value in named if value for word in (option, value)]
    sys.stdout.flush()
    # -P: load nothing from the directory that it is started in.
    command = [sys.executable, "-P", "-m", "mirrord.daemon", *arguments]
    os.execv(sys.executable, command)  # noqa: S606


def reload(session: Session) -> None:
    """Prints the settings that changed; those that need a restart go to stderr.

    An invalid file changes nothing: status 2.
    """
    answer = session.client.reload()
    session.answer(answer, answer.applied)
    for key in answer.refused:
        session.note(f"{key} needs a restart")


def events(
    session: Session,
    follow: Annotated[
        bool, Option("Print new events, through restarts of the daemon.", flags="--follow -f")
    ] = False,
    after: Annotated[str | None, Option("Start after this event.", "BOOT:ID")] = None,
) -> None:
    """Prints those since the daemon's start. With --json, one object per line."""
    for event in session.client.events(after=after, follow=follow):
        as_json = json.dumps(event.to_json(), ensure_ascii=False)
        print_line(as_json if session.json else _event_line(event))


def _event_line(event: Event) -> str:
    words = [when(event.at), event.name]
    for name, value in event.to_json()["fields"].items():
        # a word stays a word; anything else becomes JSON, so that a line splits at its spaces
        is_word = isinstance(value, str) and value and value.isprintable() and " " not in value
        said = value if is_word else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        words.append(f"{name}={said}")
    return " ".join(words)
