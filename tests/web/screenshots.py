"""The pictures in docs/observability/README.md, of a real daemon with made-up repositories (`make screenshots`).

Clients work at a changing pace for as long as `--minutes` says, so that the plots show something.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from browser import Browser, browser
from gitrepos import Upstream
from web_daemon import page_daemon

from mirrord import Client
from mirrord.cli.main import run
from mirrord.errors import IntegrityError, UpstreamError

REPOS = {"astropy/astropy": 60, "pallets/flask": 25, "psf/requests": 40, "sympy/sympy": 80}
AGENTS = (3001, 3002, 3003)
BYTES_MAX = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="screenshots", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="screenshots-") as root, ExitStack() as stack:
        upstream = json.dumps(f"file://{root}/{{owner}}/{{name}}")
        text = f'[access]\ngroup = "users"\n[upstream]\nurl = {upstream}\n'
        running, port = stack.enter_context(page_daemon(text))
        Path(root).chmod(0o755)
        client = stack.enter_context(Client(running.socket))
        instances = _furnish(client, Path(root))
        rehearse = ["--socket", str(running.socket), "rehearse", "--dataset", "lite"]
        assert run(rehearse) == IntegrityError.exit_status
        for number, instance in enumerate(instances[:9]):
            stack.enter_context(client.checkout(instance, owner=AGENTS[number % 3]))
        with _agents(running.socket, instances):
            time.sleep(60 * words.minutes)
            with browser() as window:
                for name, picture in _pictures(window, f"http://127.0.0.1:{port}"):
                    assert len(picture) <= BYTES_MAX, (name, len(picture))
                    (words.directory / name).write_bytes(picture)
                    print(f"{words.directory / name}: {len(picture):,} bytes")
    return 0


def _furnish(client: Client, root: Path) -> list[str]:
    """Make mirrors, datasets and an audit, some of them failing; return those that work."""
    rows = []
    for repo, count in REPOS.items():
        upstream = Upstream(root / repo)
        prefix = repo.replace("/", "__")
        for number, commit in enumerate(upstream.history(count)[::2]):
            rows.append(
                {
                    "instance_id": f"{prefix}-{1000 + 7 * number}",
                    "repo": repo,
                    "base_commit": commit,
                }
            )
    works = [row["instance_id"] for row in rows]
    lost = {"instance_id": "sympy__sympy-1", "repo": "sympy/sympy", "base_commit": "1" * 40}
    absent = {"instance_id": "a__gone-7", "repo": "a/gone", "base_commit": "2" * 40}
    for name, some in {"lite": [*rows[::3], lost], "full": [*rows, lost, absent]}.items():
        file = root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in some))
        with suppress(UpstreamError):
            client.wait(client.import_dataset(file, name=name))
    client.wait(client.start_audit())
    return works


@contextmanager
def _agents(socket: Path, instances: list[str]) -> Iterator[None]:
    """Clients that check out, write, diff, reset and release until the block ends."""
    stop = threading.Event()

    def work(seed: int) -> None:
        chance, began = random.Random(seed), time.monotonic()
        with Client(socket) as client:
            while not stop.is_set():
                with client.checkout(chance.choice(instances), owner=AGENTS[seed]) as made:
                    Path(made.path, "README").write_text("changed\n")
                    made.diff()
                    made.reset()
                minutes = (time.monotonic() - began) / 60
                stop.wait(0.3 + 0.25 * math.sin(minutes / 3 + seed) + chance.random() / 10)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(AGENTS))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _pictures(window: Browser, origin: str) -> Iterator[tuple[str, bytes]]:
    window.resize(980, 1000)
    window.open(origin)
    yield "web-overview.png", window.screenshot()
    window.resize(360, 740, dark=True)
    window.open(f"{origin}/datasets/full")
    yield "web-telephone.png", window.screenshot()


if __name__ == "__main__":
    sys.exit(main())
