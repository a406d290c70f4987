"""What templates take on disk, of base commits and of one-file variants: while they are warm, and when nobody asks for them."""

from __future__ import annotations

import statistics
from datetime import timedelta
from functools import partial

from measured_daemon import MIRROR, Daemon
from resets import timed
from results import Figure
from rivals import Git

_INDEXES_KEPT = 50  # of the templates that were asked for last, an index is there


class Stores:
    """The templates of the daemon's one mirror; `line` is its history, newest first."""

    def __init__(self, daemon: Daemon, git: Git, line: list[str]) -> None:
        self._daemon = daemon
        self._git = git
        self._line = line
        self.figures: list[Figure] = []

    def base_commits(self, count: int = 300) -> None:
        """Sealed base commits spread over 5,000 commits, oldest first, as they are prepared after an import."""
        line = self._line[:5000]
        commits = line[:: max(1, len(line) // count)][:count][::-1]
        floor = self._git.floor_bytes(line[0])
        self._daemon.forget_templates()
        self._check_out(commits)
        what = f"{len(commits)} sealed base commits"
        self._weigh(f"{what}, all warm", self._daemon.templates_bytes(), floor)
        self._weigh(
            f"{what}, every version of a file once, and one closure pack",
            self._git.least_bytes(commits),
            floor,
        )
        self._rest(what, commits, floor)

    def variants(self, count: int = 5000) -> None:
        """One-file variants of one commit, SWE-smith's shape; each is checked out once, and then once more."""
        tip = self._line[0]
        floor = self._git.floor_bytes(tip)
        commits = self._git.write_variants(self._daemon.mirror, tip, count)
        self._daemon.forget_templates()
        self._check_out([tip])
        alone = self._daemon.templates_bytes()
        first, last = commits[: count // 10], commits[-count // 10 :]
        began = timed(partial(self._check_out, first))
        self._check_out(commits[len(first) : -len(last)])
        ended = timed(partial(self._check_out, last))
        warm = self._daemon.templates_bytes()
        busy = self._daemon.memory()
        again = timed(partial(self._check_out, last[-_INDEXES_KEPT:])) / len(last[-_INDEXES_KEPT:])
        what = f"{count:,} one-file variants"
        self.figures += [
            Figure(
                "first checkout of a one-file variant, of the first tenth",
                began / len(first) * 1000,
                "ms",
            ),
            Figure(
                "first checkout of a one-file variant, of the last tenth",
                ended / len(last) * 1000,
                "ms",
            ),
            Figure(
                "checkout and release of one that is warm beside all the others", again * 1000, "ms"
            ),
            Figure(
                "disk of each one-file variant that is warm", (warm - alone) / count / 1024, "KiB"
            ),
            Figure(
                f"daemon memory just after {what}, workers included",
                busy["rss_mib"],
                "MiB resident",
            ),
        ]
        self._weigh(f"{what}, all warm", warm, floor)
        self._rest(what, commits, floor)

    def _rest(self, what: str, commits: list[str], floor: int) -> None:
        """What stays on disk of templates that nobody uses any more, and what it costs to ask again."""
        left = len(commits) - min(self._daemon.rest(timedelta(days=8)), len(commits))
        self._weigh(
            f"{what}, 8 days after the last was asked for", self._daemon.templates_bytes(), floor
        )
        self.figures.append(Figure("of them still warm then", left, "commits"))
        self._check_out(commits[-1:])
        some = commits[:: max(1, len(commits) // 10)][:10]
        again = [timed(partial(self._check_out, [commit])) for commit in some]
        self.figures.append(
            Figure("first checkout of one that had gone", statistics.median(again) * 1000, "ms")
        )

    def _check_out(self, commits: list[str]) -> None:
        with self._daemon.client() as client:
            for commit in commits:
                client.checkout(mirror=MIRROR, commit=commit).release()

    def _weigh(self, what: str, ours: float, floor: int, goal: str = "") -> None:
        self.figures.append(
            Figure(f"disk of {what}", ours / floor, "times a full tree and a closure pack", goal)
        )
