"""The right word for a mistyped verb or name."""

from collections.abc import Sequence
from difflib import get_close_matches

from .. import errors
from ..errors import MirrordError
from ..model import shown
from .completion import COMPLETED, candidates
from .session import Session
from .table import VERBS

# words of other programs, for which the letters of ours say nothing
_SYNONYMS = {
    "cat": "show", "clone": "checkout", "cp": "fork", "create": "add", "del": "remove",
    "delete": "remove", "down": "release", "fetch": "sync", "free": "release", "get": "show",
    "history": "log", "info": "show", "inspect": "show", "kill": "cancel", "load": "import",
    "logs": "events", "ls": "list", "new": "add", "ps": "checkouts", "pull": "sync",
    "rm": "remove", "run": "exec", "shell": "exec", "start": "serve", "stop": "cancel",
    "top": "status", "up": "serve", "update": "sync", "worktree": "checkout",
}  # fmt: skip

# without a group, what people mean most
_AT_TOP = {
    **{word: ["checkouts", "dataset list", "mirror list"] for word in ("list", "ls")},
    "rm": ["release", "dataset remove"],
}

_KINDS: dict[type[MirrordError], str] = {
    errors.MirrorNotFoundError: "mirror",
    errors.InstanceNotFoundError: "instance",
    errors.CheckoutNotFoundError: "checkout",
}


def find_verbs(group: str, word: str) -> list[str]:
    """Return up to three verbs that may be meant by a word, in a group or at the top."""
    prefix = f"{group} " if group else ""
    names = [verb.name.removeprefix(prefix) for verb in VERBS if verb.name.startswith(prefix)]
    top = list(dict.fromkeys(name.partition(" ")[0] for name in names))
    meant = _SYNONYMS.get(word, word)
    if meant in top:
        close = [meant]
    elif not group and word in _AT_TOP:
        close = _AT_TOP[word]
    else:
        leaves = [name for name in names if name.rpartition(" ")[2] == meant]
        close = get_close_matches(word, top, 1) or leaves[:3]
    return [f"{prefix}{name}" for name in close]


def with_suggestion(
    session: Session, error: MirrordError, arguments: Sequence[str]
) -> MirrordError:
    """Return an error about an unknown name with the name that may be meant in its hint."""
    kind = _KINDS.get(type(error)) or str(error.facts.get("kind"))
    if kind not in COMPLETED:
        return error
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    names = {_plain(name): name for name, _ in candidates(session, kind)}
    if kind == "checkout":  # an instance's id names its checkout
        names |= {_plain(about): name for name, about in candidates(session, kind)}
    for word in (_plain(word) for word in own if not word.startswith("-")):
        close = get_close_matches(word, names, 1, 0.8)
        if close and names[close[0]] != word:  # else it is there, and another is missing
            hint = f"did you mean {shown(names[close[0]])}?"
            return type(error)(error.message, hint=hint, **error.facts)
    return error


def _plain(name: str) -> str:
    return name.partition("@")[0].replace("/", "__", 1).lower()
