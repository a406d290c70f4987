"""git children: isolation, deadlines, limits, errors, secrets."""

from __future__ import annotations

import asyncio
import http.server
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from gitrepos import Upstream, git
from waiting import BOUND_S

from mirrord.errors import (
    CorruptObjectError,
    DeadlineError,
    DiskFailedError,
    DiskFullError,
    GitFailedError,
    GitKilledError,
    MirrordError,
    UpstreamAuthError,
    UpstreamNotFoundError,
    UpstreamThrottledError,
    UpstreamTimeoutError,
)
from mirrord.git.command import Git, low_priority, run_git_sync
from mirrord.git.configuration import Remote
from mirrord.git.errors import (
    HttpAnswer,
    StderrReader,
    failure,
    foreign_redirect,
    retry_after_seconds,
)
from mirrord.mirrors.upstreams.upstream import blames_objects
from mirrord.protocol import Progress

SHORT = timedelta(milliseconds=300)


@pytest.fixture
def run_git(tmp_path: Path) -> Callable[[Callable[[Git], Awaitable[object]]], object]:
    def run(body: Callable[[Git], Awaitable[object]]) -> object:
        return anyio.run(body, Git(home=tmp_path / "home"))

    return run


class _Answering(http.server.BaseHTTPRequestHandler):
    answer: tuple[int, dict[str, str], bytes] = (404, {}, b"")
    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def forge() -> Iterator[type[_Answering]]:
    """A web server that answers as the test says; `url` is its address."""
    handler = type("Handler", (_Answering,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    url = f"http://127.0.0.1:{server.server_port}/owner/name.git"
    handler.url = url  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_command_returns_its_output(run_git: Any, make_upstream: Callable[..., Upstream]) -> None:
    """stdout is bytes, stdin may be; the repository is named, not discovered."""
    upstream = make_upstream()
    commit = upstream.commit({"a": "1"})

    async def body(git: Git) -> None:
        result = await git.run(
            "cat-file",
            "--batch-check",
            git_dir=upstream.path / ".git",
            stdin=f"{commit}\n".encode(),
        )
        assert result.lines[0].startswith(f"{commit} commit ")

    run_git(body)


def test_background_work_has_low_priority(run_git: Any, tmp_path: Path) -> None:
    """In its block and in tasks started there, and no longer."""
    show = ("-c", "alias.niceness=!ps -o ni= -p $$", "niceness")
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(ours + 10, 19)

    async def body(git: Git) -> None:
        with low_priority():
            inside, task = await git.run(*show), asyncio.ensure_future(git.run(*show))
            assert int(run_git_sync(*show).stdout) == lower
        outside = await git.run(*show)
        assert [int(done.stdout) for done in (inside, await task, outside)] == [
            lower,
            lower,
            ours,
        ]

    run_git(body)


def test_output_and_input_may_be_files(
    run_git: Any, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """Large streams do not pass through the daemon's memory."""
    upstream = make_upstream()
    commit = upstream.commit({"a": "1"})
    (tmp_path / "in").write_text(f"{commit}\n", encoding="ascii")

    async def body(git: Git) -> None:
        await git.run(
            "rev-list",
            "--stdin",
            git_dir=upstream.path / ".git",
            stdin=tmp_path / "in",
            stdout_path=tmp_path / "out",
        )

    run_git(body)
    assert (tmp_path / "out").read_text(encoding="ascii") == f"{commit}\n"


def test_neither_the_environment_nor_the_repository_runs_a_program(
    run_git: Any,
    make_upstream: Callable[..., Upstream],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks, fsmonitor, aliases and variables of the environment have no effect."""
    upstream = make_upstream()
    upstream.commit({"a": "1"})
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\necho {tmp_path}/sprung >> {tmp_path}/sprung\n", encoding="utf-8")
    trap.chmod(0o755)
    upstream.git("config", "core.fsmonitor", str(trap))
    upstream.git("config", "core.hooksPath", str(tmp_path))
    trap.rename(tmp_path / "reference-transaction")
    (tmp_path / "trap").symlink_to("reference-transaction")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(trap))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")

    git_dir = upstream.path / ".git"

    async def body(git: Git) -> None:
        await git.run("update-ref", "refs/heads/other", "HEAD", git_dir=git_dir)

    run_git(body)
    (upstream.path / "a").write_text("2", encoding="ascii")
    for command in (["status"], ["diff", "--no-ext-diff", "HEAD"]):
        assert run_git_sync(*command, git_dir=git_dir, work_tree=upstream.path).stdout
    assert not (tmp_path / "sprung").exists()


def test_ext_urls_are_refused(run_git: Any, tmp_path: Path) -> None:
    """A URL cannot name a program."""

    async def body(git: Git) -> None:
        with pytest.raises(MirrordError):
            await git.run("ls-remote", f"ext::touch {tmp_path}/sprung", remote=Remote("ext::x"))

    run_git(body)
    assert not (tmp_path / "sprung").exists()


def test_a_deadline_kills_the_whole_group(
    run_git: Any, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """git's own children do not survive it."""
    upstream = make_upstream()
    upstream.commit({"a": "1"})
    alias = f"!echo $$ > {tmp_path}/pid; exec sleep 60"

    async def body(git: Git) -> None:
        deadline = SHORT
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            with pytest.raises(DeadlineError, match="cannot wait for nothing"):
                await git.run(
                    "-c",
                    f"alias.w={alias}",
                    "w",
                    git_dir=upstream.path / ".git",
                    timeout=deadline,
                    doing="wait for nothing",
                )
            deadline *= 2  # a busy machine may not have begun it
        await _gone(tmp_path / "pid")

    run_git(body)


def test_cancelling_kills_the_whole_group(
    run_git: Any, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """No git is left after its caller."""
    upstream = make_upstream()
    upstream.commit({"a": "1"})
    alias = f"!echo $$ > {tmp_path}/pid; exec sleep 60"

    async def body(git: Git) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: git.run("-c", f"alias.w={alias}", "w", git_dir=upstream.path / ".git")
            )
            with anyio.fail_after(BOUND_S):
                while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        await _gone(tmp_path / "pid")

    run_git(body)


async def _gone(pid_file: Path) -> None:
    pid = int(pid_file.read_text(encoding="ascii"))
    with anyio.fail_after(BOUND_S):
        while _runs(pid):
            await anyio.sleep(0.01)


def _runs(pid: int) -> bool:
    """False for an orphan that has ended; init may reap it late."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_over_the_limit_is_an_error(run_git: Any) -> None:
    """A repository cannot fill the daemon's memory."""

    async def body(git: Git) -> None:
        with pytest.raises(GitFailedError, match="larger than 100 bytes"):
            await git.run("help", "--all", stdout_limit_bytes=100)

    run_git(body)


def test_an_expected_status_is_no_error(
    run_git: Any, make_upstream: Callable[..., Upstream]
) -> None:
    """`ok` lists the statuses that have a meaning."""
    upstream = make_upstream()
    upstream.commit({"a": "1"})

    async def body(git: Git) -> int:
        result = await git.run(
            "show-ref",
            "--verify",
            "--quiet",
            "refs/heads/none",
            git_dir=upstream.path / ".git",
            ok=(0, 1),
        )
        return result.status

    assert run_git(body) == 1


def test_a_damaged_object_is_an_integrity_error(make_upstream: Callable[..., Upstream]) -> None:
    """In workers too."""
    upstream = make_upstream()
    commit = upstream.commit({"a": "1"})
    loose = upstream.path / ".git/objects" / commit[:2] / commit[2:]
    loose.chmod(0o644)
    loose.write_bytes(b"not zlib")
    with pytest.raises(CorruptObjectError):
        run_git_sync("rev-list", commit, git_dir=upstream.path / ".git")


def test_quarantined_objects_stay_out_of_the_repository(
    run_git: Any, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    upstream = make_upstream()
    upstream.commit({"a": "1"})
    git_dir = upstream.path / ".git"

    async def body(git: Git) -> None:
        made = await git.run(
            "hash-object",
            "-w",
            "--stdin",
            git_dir=git_dir,
            stdin=b"new",
            quarantine_objects=tmp_path / "objects",
        )
        oid = made.lines[0]
        assert (tmp_path / "objects" / oid[:2] / oid[2:]).exists()
        assert (await git.run("cat-file", "-e", oid, git_dir=git_dir, ok=(0, 1))).status == 1

    (tmp_path / "objects").mkdir()
    run_git(body)


# -- upstream -------------------------------------------------------------------------------------


def ask(
    url: str, username: str | None = None, password: str | None = None, **options: Any
) -> Callable[[Git], Awaitable[object]]:
    remote = Remote(url, username, password)
    return lambda git: git.run("ls-remote", url, remote=remote, doing="ask upstream", **options)


def test_an_absent_repository_is_not_found(run_git: Any, forge: Any) -> None:
    with pytest.raises(UpstreamNotFoundError, match="cannot ask upstream"):
        run_git(ask(forge.url))


def test_an_absent_directory_is_not_found(run_git: Any, tmp_path: Path) -> None:
    with pytest.raises(UpstreamNotFoundError):
        run_git(ask(f"file://{tmp_path}/absent"))


def test_a_required_password_is_an_error_without_a_prompt(run_git: Any, forge: Any) -> None:
    forge.answer = (401, {"WWW-Authenticate": 'Basic realm="x"'}, b"")
    with pytest.raises(UpstreamAuthError):
        run_git(ask(forge.url, timeout=timedelta(seconds=20)))


def test_credentials_reach_their_host_and_no_message(run_git: Any, forge: Any) -> None:
    """A helper passes them on. A wrong password is an error without the password."""
    forge.answer = (401, {"WWW-Authenticate": 'Basic realm="x"'}, b"")
    with pytest.raises(UpstreamAuthError) as caught:
        run_git(ask(forge.url, username="me", password="s3cretpassword"))
    assert "s3cret" not in str(caught.value.problem())
    assert forge.seen[-1] == "Basic bWU6czNjcmV0cGFzc3dvcmQ="


def test_throttling_says_how_long_to_wait(run_git: Any, forge: Any) -> None:
    """Retry-After is read from the response's headers."""
    forge.answer = (429, {"Retry-After": "17"}, b"slow down")
    with pytest.raises(UpstreamThrottledError) as caught:
        run_git(ask(forge.url))
    assert caught.value.facts["retry_after_s"] == 17


def test_garbage_is_an_upstream_error(run_git: Any, forge: Any) -> None:
    forge.answer = (200, {"Content-Type": "text/html"}, b"<html>hello</html>")
    with pytest.raises(MirrordError) as caught:
        run_git(ask(forge.url))
    assert caught.value.exit_status == 6


def test_a_silent_upstream_times_out(run_git: Any) -> None:
    """After the quiet time, if a host accepts and sends nothing."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/o/n.git"
        with pytest.raises(UpstreamTimeoutError, match="silent"):
            run_git(ask(url, quiet_timeout=SHORT))


def test_a_url_in_the_process_list_has_no_secret(
    run_git: Any, make_upstream: Callable[..., Upstream], tmp_path: Path
) -> None:
    """Command lines of git and its helpers are public; their environment is not."""
    upstream = make_upstream()
    upstream.commit({"a": "1"})

    async def body(git: Git) -> None:
        remote = Remote("https://example.invalid/o/n.git", "me", "s3cretpassword")
        alias = f"!tr '\\0' ' ' < /proc/$PPID/cmdline > {tmp_path}/seen"
        await git.run("-c", f"alias.w={alias}", "w", git_dir=upstream.path / ".git", remote=remote)

    run_git(body)
    assert "s3cret" not in (tmp_path / "seen").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("stderr", "code"),
    [
        ("fetch-pack: unexpected disconnect while reading sideband packet\nfatal: early EOF\n", "upstream-unavailable"),
        ("fetch-pack: unexpected disconnect while reading sideband packet\nfatal: protocol error: bad pack header\n", "upstream-unavailable"),
        ("error: inflate: data stream error (incorrect data check)\nfatal: pack has bad object at offset 889: inflate returned -3\n", "upstream-failed"),
        ("error: RPC failed; curl 18 transfer closed with outstanding read data remaining\n", "upstream-unavailable"),
        ("fatal: pack is corrupted (SHA1 mismatch)\nfatal: fetch-pack: invalid index-pack output\n", "upstream-failed"),
        ("remote: fatal: packed object is corrupt\nremote: aborting due to possible repository corruption on the remote side.\nfatal: early EOF\n", "upstream-failed"),
        (f"remote: fatal: unable to read {'a' * 40}\nfatal: early EOF\n", "upstream-failed"),
        (f"error: object {'a' * 40}: hasDotgit: contains '.git'\nfatal: fsck error in pack objects\n", "upstream-failed"),
        (f"error: Could not read {'a' * 38}00\nfatal: the remote end hung up unexpectedly\n", "upstream-unavailable"),
        ("fatal: the remote end hung up unexpectedly\nerror: write: No space left on device\n", "disk-full"),
        ("fatal: remote error: GitLab is currently unable to handle this request due to load.\n", "upstream-unavailable"),
        ("error: RPC failed; curl 92 HTTP/2 stream 5 was not closed cleanly: CANCEL (err 8)\nfatal: early EOF\n", "upstream-unavailable"),
        ("fatal: unable to access 'https://h/x/': Could not resolve host: h\n", "upstream-unavailable"),
        ("ssh: connect to host h port 22: Connection refused\nfatal: Could not read from remote repository.\n", "upstream-unavailable"),
        ("remote: You have triggered an abuse detection mechanism.\nfatal: unable to access 'https://h/x/': The requested URL returned error: 403\n", "upstream-throttled"),
        ("remote: You have exceeded a secondary rate limit.\nfatal: unable to access 'https://h/x/': The requested URL returned error: 403\n", "upstream-throttled"),
        ("remote: Repository unavailable due to DMCA takedown.\nfatal: unable to access 'https://h/x/': The requested URL returned error: 403\n", "upstream-not-found"),
        ("fatal: unable to access 'https://h/github/dmca/': The requested URL returned error: 403\n", "upstream-auth"),
    ],
)  # fmt: skip
def test_a_transfer_that_broke_is_no_fault_of_upstream(stderr: str, code: str) -> None:
    """What git (2.39) said when a pack was cut or changed on its way, and when upstream failed."""
    http = HttpAnswer(200)
    assert failure("fetch", 128, stderr, upstream=True, http=http).code == code


@pytest.mark.root
def test_a_disk_without_room_is_told_where_git_does_not_say_so(
    run_git: Any, tmp_path: Path, make_upstream: Callable[..., Upstream]
) -> None:
    """A ref that moves: git (2.39) says "couldn't write", without the reason."""
    upstream = make_upstream()
    tip = upstream.commit({"a": "1"})
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], check=True)
    try:
        git_dir = small / "m"
        git(tmp_path, "clone", "--quiet", "--bare", str(upstream.path), str(git_dir))
        with (small / "fill").open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        moves = f"create refs/heads/x {tip}\n".encode()

        async def move(it: Git) -> None:
            await it.run("update-ref", "--stdin", git_dir=git_dir, stdin=moves)

        with pytest.raises(DiskFullError):
            run_git(move)
        with pytest.raises(DiskFullError):
            run_git_sync("update-ref", "--stdin", git_dir=git_dir, stdin=moves)
        (small / "fill").unlink()
        run_git(move)
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


# -- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stderr", "upstream", "error"),
    [
        ("fatal: write error: No space left on device", True, DiskFullError),
        ("error: unable to write file: Disk quota exceeded", False, DiskFullError),
        ("fatal: sha1 file 'p' write error. Out of diskspace", False, DiskFullError),
        ("fatal: unable to create 'p': Read-only file system", False, DiskFailedError),
        ("fatal: unable to create 'p': Read-only file system", True, DiskFailedError),
        (
            "fatal: could not read Username for 'https://x': terminal prompts disabled",
            True,
            UpstreamAuthError,
        ),
        ("fatal: unable to get password from user", True, UpstreamAuthError),
        (
            "Host key verification failed.\nfatal: Could not read from remote repository.",
            True,
            UpstreamAuthError,
        ),
        ("fatal: repository 'http://x/y/' not found", True, UpstreamNotFoundError),
        ("error: object file .git/objects/aa/bb is corrupt", False, CorruptObjectError),
        ("fatal: something new", False, GitFailedError),
    ],
)
def test_what_git_says_becomes_an_error(
    stderr: str, upstream: bool, error: type[MirrordError]
) -> None:
    found = failure(doing="do it", status=128, stderr=stderr, upstream=upstream, http=HttpAnswer())
    assert type(found) is error
    assert found.hint


def test_an_object_that_upstream_lacks_is_not_our_corruption() -> None:
    stderr = (
        "remote: fatal: unable to read 0123456789\nfatal: remote error: upload-pack: not our ref"
    )
    found = failure(doing="fetch", status=128, stderr=stderr, upstream=True, http=HttpAnswer())
    assert found.exit_status == 6


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert retry_after_seconds("30", now=now) == 30
    assert retry_after_seconds("Thu, 01 Jan 2026 00:01:00 GMT", now=now) == 60
    assert retry_after_seconds("soon", now=now) is None
    for value in ("999999999", "Fri, 31 Dec 9999 23:59:59 -2300"):
        assert retry_after_seconds(value, now=now) == 86400, "it would overflow a date"


def test_a_redirect_to_another_host_is_found() -> None:
    def found(target: str) -> str | None:
        return foreign_redirect("https://host/a", f"warning: redirecting to {target}")

    assert found("https://host/b") is None
    assert found("http://host/a") == "http://host/a"
    assert found("https://me:secret@other/a") == "https://***@other/a"
    assert found("http://[") == "http://["


def test_progress_and_messages_are_distinguished() -> None:
    """Chunks may end anywhere; traces are dropped."""
    seen: list[Progress] = []
    reader = StderrReader(seen.append)
    data = (
        b"Receiving objects:  50% (1/2)\r"
        b"Receiving objects: 100% (2/2), 1 KiB | 2 MiB/s, done.\nfatal: no\n"
    )
    data += b"12:00:00.1 http.c:5  => Send header: Authorization: Basic x\n"
    for at in range(0, len(data), 7):
        reader.feed(data[at : at + 7])
    assert [(p.done, p.total, p.unit) for p in seen] == [(1, 2, "objects"), (2, 2, "objects")]
    assert reader.text() == "fatal: no"
    seen.clear()
    reader.feed(data)
    assert [p.done for p in seen] == [2], "what was overwritten in the same moment is not news"


def test_home_of_git_children_is_private(tmp_path: Path) -> None:
    """Making it again is fine."""
    Git(home=tmp_path / "home")
    Git(home=tmp_path / "home")
    assert os.listdir(tmp_path / "home") == [".gitconfig"]


def test_a_killed_git_is_no_corruption() -> None:
    """Nor is a ref of upstream to blame."""
    error = failure(
        doing="fetch", status=-9, stderr="error: bad object", upstream=True, http=HttpAnswer()
    )
    assert isinstance(error, GitKilledError)
    assert not blames_objects(error)


def test_a_crashed_git_means_a_damaged_object() -> None:
    """`index-pack --verify` aborts on some packs: they are reported, and the audit continues."""
    error = failure(
        doing="verify pack-1.idx", status=-6, stderr="", upstream=False, http=HttpAnswer()
    )
    assert isinstance(error, GitFailedError)
    assert "signal 6" in error.message
