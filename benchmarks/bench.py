"""The same work side by side in one run: mirrord through its socket, and what a user would do otherwise.

`make bench REPO=/path/of/a/repository` prints a table and writes build/bench.json; DOCS=1 also docs/benchmarks.md and its plot.
BENCH_ARGS='--ext4 --cases rollouts' measures what a rollout asks for, on a journaled ext4 whatever the disk is.
BENCH_ARGS='--pod 0 --ext4 --cases plain' measures root in a container without CAP_SYS_ADMIN, --pod 1500 a user there.
BENCH_ARGS='--ext4 --cases home' measures an ordinary user's daemon in its home beside root's.
Each round does ours and theirs one after the other, so that a machine whose speed drifts moves both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import big_mirror
import crowd
import neighbours
import scale
import soak
import soak_turns
from audits import Audited
from beside_root import compare_home
from imports import imports
from in_pod import run_in_pod
from load import kernel_alone, lean_clients, python_client, tasks_of_one_client, tasks_of_streams
from measured_daemon import MIRROR, Daemon
from plain_trees import PlainTrees
from rehearsals import rehearse
from report import print_table, write_docs
from resets import Holder, dirty_reset, held, holders, timed, to_and_fro
from results import Figure, Growth, Latency, Row
from rivals import Git, dirty, git
from rollouts import Rollouts
from sandboxes import Sandboxes
from stores import Stores

from mirrord import Client
from mirrord.host.files import opened
from mirrord.host.mount_tables import mounts_below
from mirrord.host.mounts import attach, make_overlay, umount
from mirrord.model import AuditLevel, Backend

_EXT4_BYTES = 16 << 30
ROLLOUTS = ("diff", "apply", "branch", "grade", "turn", "crowd")  # and `cold`, which pauses
# those that docs/benchmarks.md shows
PAGE = ("first", "warm", "reset", "near", "pool", "audit", *ROLLOUTS[:-1])


class Bench:
    def __init__(self, source: Path, area: Path, rounds: int) -> None:
        self.rounds = rounds
        self.source, self.area = source, area
        self.git = Git(source, area)
        self.line = self.git.line(6000)
        self.daemon = Daemon(area / "daemon", source)
        self.rows: list[Row] = []
        self.figures: list[Figure] = []
        self.growths: list[Growth] = []
        self.latencies: list[Latency] = []

    def compare(
        self,
        row: Row,
        ours: Callable[[], float],
        theirs: Callable[[], float],
        rounds: int | None = None,
    ) -> None:
        for _ in range(rounds or self.rounds):
            row.ours.append(ours())
            row.theirs.append(theirs())
        self.rows.append(row)
        print(f"  {row.work} / {row.against}: {row.ratio:.1f}", flush=True)

    @cached_property
    def rollouts(self) -> Rollouts:
        return Rollouts(self.daemon, self.git, self.line[0], self.compare)

    @cached_property
    def sandboxes(self) -> Sandboxes:
        return Sandboxes(self.daemon, self.git, self.line[0], self.compare)

    def sandbox(self) -> None:
        self.sandboxes.alone(self.rounds)
        self.sandboxes.many()
        self._take_figures()

    def loop(self) -> None:
        self.sandboxes.loop()
        self._take_figures()

    def plain(self) -> None:
        trees = PlainTrees(self.daemon, self.git, self.line[0], self.compare)
        trees.run()
        self.figures += trees.figures

    def home(self) -> None:
        compare_home(self.daemon, self.source, self.line[0], self.compare)

    def _take_figures(self) -> None:
        self.figures += self.sandboxes.figures
        self.sandboxes.figures = []

    def crowd(self, tasks: int, seconds: float) -> None:
        where = self.daemon, self.git, self.line[0], self.rollouts.instance
        for change, by_finish in product(((20, 100), (3, 1)), (False, True)):
            taken, figures = crowd.compare(*where, *change, tasks, seconds, by_finish=by_finish)
            self.latencies += taken
            self.figures += figures

    def neighbours(self, seconds: float) -> None:
        taken, figures = neighbours.compare(self.daemon, self.line, seconds)
        self.latencies += taken
        self.figures += figures

    # -- cases --------------------------------------------------------------------------------------------------------

    def warm_checkout(self) -> None:
        tip = self.line[0]
        with self.daemon.client() as client:
            client.checkout(mirror=MIRROR, commit=tip).release()

            def ours() -> float:
                began = time.perf_counter()
                checkout = client.checkout(mirror=MIRROR, commit=tip)
                took = time.perf_counter() - began
                checkout.release()
                return took

            add = self._rival(lambda path: self.git.worktree_add(path, tip))
            shared = self._rival(lambda path: self.git.clone_shared(path, tip))
            self.compare(
                Row("warm sealed checkout", "git worktree add --detach", goal=200), ours, add
            )
            self.compare(
                Row("warm sealed checkout", "git clone --shared, checkout", goal=200), ours, shared
            )
            self.compare(
                Row(
                    "warm sealed checkout",
                    "three mkdirs and a mount, and a health request",
                    goal=0.4,
                ),
                ours,
                self._floor(client),
            )

    def _floor(self, client: Client) -> Callable[[], float]:
        lower = self.area / "floor-lower"
        self.git.worktree_add(lower, self.line[0])
        count = iter(range(10**6))

        def floor() -> float:
            at = self.area / f"floor-{next(count)}"
            upper, work, tree = at / "upper", at / "work", at / "tree"
            began = time.perf_counter()
            at.mkdir()
            for path in (upper, work, tree):
                path.mkdir()
            with ExitStack() as stack:
                below, above, scratch = (
                    stack.enter_context(opened(os.open(each, os.O_PATH)))
                    for each in (lower, upper, work)
                )
                attach(
                    stack.enter_context(opened(make_overlay([below], above, scratch))), str(tree)
                )
            client.health()
            took = time.perf_counter() - began
            umount(str(tree))
            shutil.rmtree(at)
            return took

        return floor

    def _rival(self, make: Callable[[Path], None]) -> Callable[[], float]:
        def theirs() -> float:
            path = self.git.fresh()
            began = time.perf_counter()
            make(path)
            took = time.perf_counter() - began
            self.git.remove(path)
            return took

        return theirs

    def reset(self) -> None:
        rival = self.git.fresh()
        self.git.worktree_add(rival, self.line[0])

        def theirs() -> float:
            dirty(rival)
            return timed(lambda: self.git.reset_and_clean(rival))

        for backend, owner in self._holders():
            with held(self.daemon, self.line[0], backend, owner) as checkout:
                goal = 30.0 if backend is Backend.OVERLAY else None
                self.compare(
                    Row(
                        f"reset, 20 changed and 100 created ({backend}{owner.label})",
                        "git reset --hard, git clean -ffdx",
                        goal=goal,
                    ),
                    dirty_reset(checkout, owner),
                    theirs,
                )

    def near_checkout(self) -> None:
        commits = iter(self.line[10::10][: self.rounds + 1])
        with self.daemon.client() as client:

            def ours() -> float:
                commit = next(commits)
                began = time.perf_counter()
                checkout = client.checkout(mirror=MIRROR, commit=commit)
                took = time.perf_counter() - began
                checkout.release()
                return took

            theirs = self._rival(lambda path: self.git.worktree_add(path, self.line[10]))
            rounds = min(self.rounds, len(self.line[10::10]) - 1)
            self.compare(
                Row(
                    "first checkout, 10 commits from one served",
                    "git worktree add --detach",
                    goal=5,
                ),
                ours,
                theirs,
                rounds,
            )

    def first_checkout(self) -> None:
        tip = self.line[0]

        def ours() -> float:
            self.daemon.forget_templates()
            with self.daemon.client() as client:
                client.health()
                began = time.perf_counter()
                checkout = client.checkout(mirror=MIRROR, commit=tip)
                took = time.perf_counter() - began
                checkout.release()
            return took

        theirs = self._rival(lambda path: self.git.clone_isolated(path, tip))
        self.compare(
            Row(
                "very first checkout, nothing prepared",
                "git clone --no-local --single-branch",
                goal=3,
            ),
            ours,
            theirs,
            3,
        )

    def pool_move(self) -> None:
        places = self.line[0], self.line[min(10, len(self.line) - 1)]
        rival = self.git.fresh()
        self.git.worktree_add(rival, places[0])
        for owner in holders():
            with held(self.daemon, self.line[0], Backend.POOL, owner) as checkout:
                checkout.reset(commit=places[1])
                ours = to_and_fro(places, lambda commit: checkout.reset(commit=commit))
                theirs = to_and_fro(places, lambda commit: self.git.move_and_clean(rival, commit))
                work = f"on to a neighbour 10 commits away, proven (pool{owner.label})"
                self.compare(Row(work, "git checkout -f, git clean -ffdx", goal=2), ours, theirs)

    def throughput(self, clients: int = 16, seconds: float = 5.0) -> None:
        """The same load three ways; each of them with the whole machine to itself."""
        asked = str(self.daemon.socket), MIRROR, self.line[0], seconds
        with self.daemon.client() as client:
            client.checkout(mirror=MIRROR, commit=self.line[0]).release()
            lean = self._rate(lean_clients, (*asked, clients // 2), 2, seconds)
            python = self._rate(python_client, asked, clients, seconds)
            leaked = len(client.list_checkouts())
        lower = self.area / "kernel-lower"
        lower.mkdir(exist_ok=True)
        kernel = self._rate(kernel_alone, (self.area, str(lower), seconds), 2, seconds)
        self.figures += [
            Figure(
                f"{clients} clients, checkout and release (plain HTTP)", lean, "a second", "1,000"
            ),
            Figure(
                f"{clients} clients, checkout and release (Python clients)",
                python,
                "a second",
                "1,000",
            ),
            Figure("the same directories and mounts, no daemon, 2 processes", kernel, "a second"),
            Figure("checkouts leaked by them", leaked, "", "0"),
        ]

    def requests(self, tasks: int, seconds: float = 5.0) -> None:
        """What the client and the HTTP on both sides cost, without any work."""
        for name, work in (("one client", tasks_of_one_client), ("bare streams", tasks_of_streams)):
            rate = self._rate(work, (str(self.daemon.socket), tasks, seconds), 1, seconds)
            self.figures.append(Figure(f"{tasks} tasks of {name}, health", rate, "a second"))

    def _rate(
        self,
        work: Callable[..., int],
        arguments: tuple[object, ...],
        processes: int,
        seconds: float,
    ) -> float:
        with ProcessPoolExecutor(processes) as pool:
            tasks = [pool.submit(work, *arguments) for _ in range(processes)]
            return sum(task.result() for task in tasks) / seconds

    def hold(self, count: int) -> None:
        """Many at once; the daemon is weighed when its workers have gone, as they do after 15 seconds without work."""
        with self.daemon.client() as client:
            client.checkout(mirror=MIRROR, commit=self.line[0]).release()
            began = time.perf_counter()
            held = [client.checkout(mirror=MIRROR, commit=self.line[0]) for _ in range(count)]
            took = time.perf_counter() - began
            busy = self.daemon.memory()
            time.sleep(20)
            idle = self.daemon.memory()
            distinct = len(
                {checkout.path for checkout in held if (checkout.path / ".git").is_dir()}
            )
            listed = min(timed(client.list_checkouts) for _ in range(5))
        self.daemon.stop()
        restarted = timed(self.daemon.start)
        with self.daemon.client() as client:
            for checkout in client.list_checkouts():
                client.release_checkout(checkout.id)
        self.figures += [
            Figure("listing them", listed, "s", "under 0.2"),
            Figure("restart of the daemon while they are held", restarted, "s"),
            Figure("held at once, each with its own tree", distinct, "checkouts", "1,000"),
            Figure("making one while they add up", took / count * 1000, "ms"),
            Figure("daemon memory just after, workers included", busy["rss_mib"], "MiB resident"),
            Figure(
                "daemon memory while they are held, workers included",
                idle["rss_mib"],
                "MiB resident",
                "under 150",
            ),
        ]

    def weigh(self, case: Callable[[Stores], None]) -> None:
        stores = Stores(self.daemon, self.git, self.line)
        case(stores)
        self.figures += stores.figures

    def audit(self) -> None:
        """Of the mirror alone: at level content templates are proven too, which git's commands have nothing like."""
        self.daemon.forget_templates()
        audited = Audited(self.daemon, self.git, self.line)
        for level, rival, theirs, goal, rounds in (
            (
                AuditLevel.CLOSURE,
                "git rev-list --objects of the same tips",
                audited.walk,
                0.77,
                self.rounds,
            ),
            (AuditLevel.CONTENT, "git fsck --full", audited.fsck, 0.91, 3),
        ):
            row = Row(f"audit, level {level}, no templates", rival, goal=goal)
            self.compare(row, partial(audited.audit, level), theirs, rounds)

    def quick_audit(self, mirrors: int = 50) -> None:
        audited = Audited(self.daemon, self.git, self.line)
        audited.multiply(mirrors)
        took = statistics.median(audited.audit(AuditLevel.QUICK) for _ in range(self.rounds))
        recorded = f"{mirrors * len(audited.commits):,} recorded commits in {mirrors} mirrors"
        self.figures.append(Figure(f"audit, level quick, of {recorded}", took, "s", "under 2"))

    def rehearse(self) -> None:
        self.figures += rehearse(self.daemon, self.git.mirror, self.line)

    def imports(self) -> None:
        self.figures += imports(self.daemon, self.git.mirror, self.line, self.compare)

    def grow(self, case: Callable[[Path, int], list[Growth]], count: int) -> None:
        """With daemons and repositories of its own."""
        tenth, whole = (
            case(self.area / f"{case.__name__}-{number}", number) for number in (count // 10, count)
        )
        self.growths += [
            replace(all_, tenth=part.whole) for part, all_ in zip(tenth, whole, strict=True)
        ]

    def cases(self, tasks: int, seconds: float) -> dict[str, Callable[[], None]]:
        rollouts = {name: partial(self._rollout, name) for name in ROLLOUTS[:-1]}
        return {
            "first": self.first_checkout,
            "warm": self.warm_checkout,
            "reset": self.reset,
            **rollouts,
            "cold": partial(self._rollout, "cold"),
            "crowd": partial(self.crowd, tasks, seconds),
            "neighbours": partial(self.neighbours, seconds),
            "sandbox": self.sandbox,
            "loop": self.loop,
            "near": self.near_checkout,
            "pool": self.pool_move,
            "plain": self.plain,
            **({} if os.geteuid() else {"home": self.home}),
            "throughput": self.throughput,
            "requests": partial(self.requests, tasks),
            "hold": partial(self.hold, 1000),
            "disk": partial(self.weigh, Stores.base_commits),
            "variants": partial(self.weigh, Stores.variants),
            "audit": self.audit,
            "quick-audit": self.quick_audit,
            "rehearse": self.rehearse,
            "imports": self.imports,
            "refs": partial(self.grow, big_mirror.many_refs, 60_000),
            "pins": partial(self.grow, big_mirror.many_pins, 5_000),
        }

    def _rollout(self, name: str) -> None:
        case: Callable[[], None] = getattr(self.rollouts, name)
        case()

    def _holders(self) -> Iterator[tuple[Backend, Holder]]:
        """The overlay, where the host allows it; the pool for each kind of owner, which costs it different work."""
        with self.daemon.client() as client:
            if client.status().backend is Backend.OVERLAY:
                yield Backend.OVERLAY, Holder(os.geteuid(), "")
        yield from ((Backend.POOL, owner) for owner in holders())


@contextmanager
def _area(parent: str | None, *, on_ext4: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mirrord-bench-", dir=parent) as name:
        Path(name).chmod(0o711)  # the socket is for other users too
        try:
            with _ext4(Path(name)) if on_ext4 else nullcontext(Path(name)) as area:
                yield area
        finally:
            for path in reversed(mounts_below(name)):  # of checkouts, which outlive their daemon
                umount(path)


@contextmanager
def _ext4(above: Path) -> Iterator[Path]:
    """An ext4 in a file, with a journal, which not every machine's disk has."""
    image, place = above / "ext4.img", above / "ext4"
    with image.open("wb") as file:
        file.truncate(_EXT4_BYTES)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--recursive", place], check=True)


def _machine(area: Path) -> dict[str, object]:
    disk = subprocess.run(
        ["findmnt", "-no", "FSTYPE,OPTIONS", "-T", area], capture_output=True, text=True, check=True
    ).stdout
    return {
        "disk": " ".join(disk.split()),
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "git": git("--version"),
        "python": platform.python_version(),
    }


def run(source: Path, area: Path, options: argparse.Namespace) -> dict[str, object]:
    bench = Bench(source.absolute(), area, options.rounds)
    try:
        everything = bench.cases(options.tasks, options.seconds)
        for name in options.cases or everything:
            print(f"{name} …", flush=True)
            everything[name]()
    finally:
        bench.daemon.stop()
    files = git("ls-tree", "-r", "--name-only", bench.line[0], cwd=bench.git.mirror).splitlines()
    rows = [{**asdict(row), "ratio": row.ratio} for row in bench.rows]
    subject = {"name": source.name, "files": len(files), "commits": len(bench.line)}
    return {
        "machine": _machine(area),
        "repository": subject,
        "cases": options.cases,
        "rows": rows,
        "figures": [asdict(f) for f in bench.figures],
        "growths": [asdict(each) for each in bench.growths],
        "latencies": [asdict(each) for each in bench.latencies],
    }


def run_scale(area: Path, options: argparse.Namespace) -> dict[str, object]:
    """Many mirrors, in daemons of their own."""
    upstreams = options.upstreams.absolute() if options.upstreams else area / "upstreams"
    load = os.getloadavg()[0]
    growths = scale.grow(area / "scale", upstreams, options.mirrors)
    rows = scale.ROWS * options.mirrors
    return {
        "machine": {**_machine(area), "load": load},
        "repository": {"name": f"{options.mirrors:,} repositories, {rows:,} rows"},
        "cases": options.cases,
        "rows": [],
        "figures": [],
        "growths": [asdict(each) for each in growths],
    }


def run_soak(area: Path, options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """A mixed load in a daemon of its own; its result, and the promises that it broke."""
    load = os.getloadavg()[0]
    source = (options.repo or [_generated(area)])[0].absolute()
    asked = soak.Options(options.seconds, options.rate, options.connections, options.restart)
    (kind,) = options.cases
    results = (soak.soak if kind == "soak" else soak_turns.turns)(area / kind, source, asked)
    how = " through a restart and a kill" if options.restart else ""
    name = f"{kind}, {options.seconds:g} s{how}: {source.name}"
    return {
        "machine": {**_machine(area), "load": load},
        "repository": {"name": name},
        "cases": options.cases,
        **soak.row_of(results),
    }, results.broken


def _generated(area: Path) -> Path:
    """5,000 files and 200 commits, when no repository is given."""
    work = area / "generated"
    work.mkdir(parents=True)
    git("init", "--quiet", "--initial-branch=main", work)
    for number in range(5000):
        file = work / f"package{number % 50}" / f"module{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"value = {number}\n" * (10 + number % 200))
    for commit in range(200):
        for number in range(commit, 5000, 250):
            with (work / f"package{number % 50}" / f"module{number}.py").open("a") as module:
                module.write(f"value += {commit}\n")
        git("add", "--all", cwd=work)
        git("commit", "--quiet", "-m", f"{commit}", cwd=work)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repo", type=Path, action="append", help="a repository to measure on; may be given again"
    )
    parser.add_argument(
        "--area", help="where to work: a directory on the file system to be measured"
    )
    parser.add_argument(
        "--ext4", action="store_true", help="work on an ext4 with a journal, in a file there"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=64, help="of the case crowd")
    parser.add_argument("--seconds", type=float, default=60.0, help="of crowd, soak and turns")
    parser.add_argument("--mirrors", type=int, default=2000, help="of the case scale")
    parser.add_argument(
        "--upstreams", type=Path, help="where the case scale keeps its repositories between runs"
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        default=[],
        help=f"rollouts are {', '.join(ROLLOUTS)}; page are those of docs/benchmarks.md;"
        " scale, soak and turns stand alone",
    )
    parser.add_argument(
        "--rate", type=float, default=5.0, help="of soak: checkouts a second; of turns: whole turns"
    )
    parser.add_argument(
        "--connections", type=int, default=1500, help="of soak: those that a bad client opens"
    )
    parser.add_argument(
        "--restart", action="store_true", help="of soak: stop and kill the daemon in its middle"
    )
    parser.add_argument(
        "--pod",
        type=int,
        metavar="UID",
        help="run the cases in a container without CAP_SYS_ADMIN, by podman; with --repo",
    )
    parser.add_argument(
        "--cap-drop", nargs="*", default=[], metavar="NAME", help="with --pod: such as mknod"
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument(
        "--docs",
        action="store_true",
        help="put the results into docs/benchmarks.json, in the place of those of the same work on the same"
        " repository, and write docs/benchmarks.md, docs/benchmarks-load.md and docs/benchmarks.svg",
    )
    options = parser.parse_args()
    groups = {"rollouts": ROLLOUTS, "page": PAGE}
    options.cases = [case for name in options.cases for case in groups.get(name, (name,))]
    broken: list[str] = []
    with _area(options.area, on_ext4=options.ext4) as area:
        if options.pod is not None:
            ran = run_in_pod(area, options)
        elif options.cases == ["scale"]:
            ran = [run_scale(area, options)]
        elif options.cases in (["soak"], ["turns"]):
            result, broken = run_soak(area, options)
            ran = [result]
        else:
            sources = options.repo or [_generated(area)]
            ran = [run(source, area / f"{at}", options) for at, source in enumerate(sources)]
    for result in ran:
        print_table(result)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(ran, indent=1) + "\n")
    print(f"\nwritten: {options.json}")
    if options.docs:
        write_docs(ran, Path("docs"))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
