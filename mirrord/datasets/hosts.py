"""Which mirror a row's repository is, where rows name hosts: one name never means two upstreams.

A URL of the host that a mirror of its name follows is that mirror, `owner__name`. Where the name is
another host's, the mirror is `host+owner__name`. A name without a host means the configured
upstream, or the mirror that exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..catalog import InstanceRow
from ..errors import InvalidNameError, InvalidUrlError
from ..mirrors.upstreams.upstream import LOCAL, is_same_host, parse_upstream
from ..model import MirrorName, shown
from .fields import RowError, host_label

_GITHUB = "github.com"


@dataclass(slots=True)
class Hosts:
    """The hosts of mirrors: of those that exist, by key, and of any other without a URL.

    `urls` are the upstreams of the file's new mirrors, by key.
    """

    default: str = ""
    known: Mapping[str, str] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    _claims: dict[str, str] = field(default_factory=dict)

    def place(self, row: InstanceRow) -> InstanceRow:
        """Return a row with the name of its mirror; raises RowError where that is ambiguous."""
        key, name = row.mirror.key, row.mirror
        taken = self.known.get(key) or self._claims.get(key)
        if row.repo_url is None:
            if key not in self.known and taken and taken != self.default:
                fact = f"a row before it has that repository at {taken}, not at {self.default}"
                raise RowError(f"repo {name.repo} is ambiguous: {fact}; write its URL")
            self._claims.setdefault(key, self.default)
            return row
        try:
            upstream = parse_upstream(row.repo_url)
        except InvalidUrlError as error:
            raise RowError(f"repo {error.message.partition(': ')[2]}") from error
        # rows mean GitHub by owner/name, and so does a local directory that serves them
        host = LOCAL if self.default == LOCAL and upstream.host == _GITHUB else upstream.host
        taken = taken or host
        if is_same_host(taken, host):
            self._claims.setdefault(key, host)
            if key not in self.known and not is_same_host(self.default, host):
                self.urls.setdefault(key, upstream.remote.url)
            return row
        try:
            other = MirrorName.parse(f"{host_label(row.repo_url)}/{name.repo}")
        except InvalidNameError as error:
            raise RowError(
                f"repo {shown(upstream.shown)} cannot be mirrored: {name} follows {taken}"
            ) from error
        if other.key not in self.known:
            self.urls.setdefault(other.key, upstream.remote.url)
        rules = (*row.rules, f"repo: at another host than {taken}, which mirror {name} follows")
        return replace(row, mirror=other, rules=rules)
