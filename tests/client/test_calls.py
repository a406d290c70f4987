"""The client against real sockets: what comes back, what does not, and what it does about it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyone
import pytest
import unasync
from anyone import NOBODY
from canned import CHECKOUT, CHECKOUT_ROUTES, COMMIT, HEALTH, LEASE, OPERATION, TREE
from httpserver import Handler, serving
from waiting import BOUND_S

import mirrord
from mirrord import AsyncClient, Client, errors
from mirrord.errors import InvalidRequestError
from mirrord.model import ApplyStrategy, FoundStrategy, View
from mirrord.protocol import Progress

# -- the generated client ---------------------------------------------------------------------------------------------


def test_the_synchronous_client_is_what_the_generator_writes() -> None:
    """Change the asynchronous client, then run `python tests/support/unasync.py`."""
    generated = unasync.generated()
    assert {path: path.read_text() for path in generated} == generated


def test_both_clients_have_the_same_methods() -> None:
    """Nothing was lost on the way."""
    names = {name.replace("aclose", "close").replace("__a", "__") for name in vars(AsyncClient)}
    assert names - {"__doc__"} == set(vars(Client)) - {"__doc__"}


# -- messages ------------------------------------------------------------------------------------------------------


def test_a_word_that_the_daemon_does_not_know_is_an_error_of_ours(tmp_path: Path) -> None:
    """Said before anybody is asked: no daemon is there."""
    with Client(tmp_path / "none") as client:
        with pytest.raises(
            InvalidRequestError, match="history: Input should be 'sealed', 'squashed' or 'linked'"
        ):
            client.checkout("a", history="open")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="level"):
            client.start_audit(level="deep")  # type: ignore[arg-type]


# -- which socket -----------------------------------------------------------------------------------------------------


def test_the_socket_is_the_one_named_else_of_the_environment_else_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stronger source wins."""
    file = tmp_path / "config.toml"
    file.write_text('socket = "/configured/s"\n')
    monkeypatch.setenv("MIRRORD_CONFIG", str(file))
    monkeypatch.delenv("MIRRORD_SOCKET", raising=False)
    assert Client().socket == Path("/configured/s")
    monkeypatch.setenv("MIRRORD_SOCKET", "/environment/s")
    assert Client().socket == Client.from_env().socket == Path("/environment/s")
    assert Client(config=file).socket == Path("/configured/s")
    assert Client("/named/s").socket == Path("/named/s")


# -- no answer --------------------------------------------------------------------------------------------------------


def test_no_socket_is_no_daemon_and_told_at_once(path: Path) -> None:
    """The hint says how to start one."""
    with (
        Client(path) as client,
        pytest.raises(errors.NoDaemonError, match="there is no such socket") as caught,
    ):
        client.status()
    assert "mirrord serve" in str(caught.value.hint)
    assert caught.value.exit_status == 9


def test_a_socket_without_a_listener_is_no_daemon(path: Path) -> None:
    """A daemon that was killed leaves its socket."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with (
        Client(path) as client,
        pytest.raises(errors.NoDaemonError, match="no process listens there"),
    ):
        client.status()


def test_a_socket_path_that_the_kernel_refuses_is_wrong_usage(tmp_path: Path) -> None:
    """sockaddr_un holds 107 bytes."""
    with (
        Client(tmp_path / ("x" * 200)) as client,
        pytest.raises(errors.UsageError, match="longer than 107 bytes"),
    ):
        client.status()


@pytest.mark.root
def test_no_permission_for_the_socket_is_not_allowed(path: Path) -> None:
    """Said by the kernel, before the daemon hears of it."""
    code = f"from mirrord import Client, errors\ntry: Client({str(path)!r}).status()\nexcept errors.AccessError as e: print(e.hint)"
    with serving(path, {}):
        path.chmod(0o600)
        command = [
            "setpriv",
            f"--reuid={NOBODY}",
            f"--regid={NOBODY}",
            "--clear-groups",
            *anyone.python(),
            "-c",
            code,
        ]
        environment = {**os.environ, "HOME": "/nonexistent"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd="/"
        )
    assert "group in [access]" in done.stdout, done.stderr


def test_a_daemon_that_dies_in_the_middle_of_an_answer_is_told(path: Path) -> None:
    """A POST is not sent again: it may have been done."""
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"
    with (
        serving(path, {("POST", "/v1/reload"): lambda h: h.die(half)}) as server,
        Client(path) as client,
    ):
        with pytest.raises(errors.NoDaemonError, match="closed the connection"):
            client.reload()
        assert server.asked == [("POST", "/v1/reload")]


def test_a_get_is_sent_again_when_the_daemon_dies_under_it(path: Path) -> None:
    """It changes nothing, so once more is safe."""
    answers: list[Any] = [lambda h: h.answer(HEALTH), lambda h: h.die(), lambda h: h.answer(HEALTH)]
    with (
        serving(path, {("GET", "/v1/health"): lambda h: answers.pop(0)(h)}),
        Client(path) as client,
    ):
        assert [client.health().version for _ in range(2)] == ["1", "1"]


def test_a_client_waits_for_a_restarting_daemon(path: Path) -> None:
    """Once it was reached: both what reads and what was never sent."""
    routes: dict[tuple[str, str], Any] = {
        ("GET", "/v1/health"): lambda h: h.answer(HEALTH),
        **CHECKOUT_ROUTES,
    }
    with Client(path) as client:
        with serving(path, routes):
            client.health()
        is_answered = threading.Event()
        again = threading.Thread(target=_serve_later, args=(path, routes, is_answered))
        again.start()
        assert client.health().status == "ok"
        assert client.checkout("x").commit == COMMIT
        is_answered.set()
        again.join()


def _serve_later(
    path: Path, routes: dict[tuple[str, str], Any], is_answered: threading.Event
) -> None:
    time.sleep(0.1)
    with serving(path, routes):
        is_answered.wait(BOUND_S)


def test_patience_with_a_restarting_daemon_has_an_end(path: Path) -> None:
    """Then it is the usual error."""
    with Client(path, patience=timedelta(milliseconds=50)) as client:
        with serving(path, {("GET", "/v1/health"): lambda h: h.answer(HEALTH)}):
            client.health()
        with pytest.raises(errors.NoDaemonError):
            client.health()


def test_a_stopping_daemon_is_asked_again(path: Path) -> None:
    """Its successor answers."""
    answers: list[Any] = [lambda h: h.problem(503, "stopping"), lambda h: h.answer(HEALTH)]
    with (
        serving(path, {("GET", "/v1/health"): lambda h: answers.pop(0)(h)}),
        Client(path) as client,
    ):
        assert client.health().status == "ok"


def test_a_silent_daemon_misses_the_deadline(path: Path) -> None:
    """The timeout is the client's."""
    is_over = threading.Event()

    def hang(_: Handler) -> None:
        is_over.wait(BOUND_S)

    with (
        serving(path, {("GET", "/v1/status"): hang}),
        Client(path, timeout=timedelta(seconds=0.05)) as client,
    ):
        with pytest.raises(errors.DeadlineError):
            client.status()
        is_over.set()


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"version": 1}'])
def test_another_server_at_the_socket_is_told_as_such(path: Path, content: bytes) -> None:
    """Neither a traceback nor a made-up answer."""
    routes: Any = {("GET", "/v1/status"): lambda h: h.answer(content)}
    with (
        serving(path, routes),
        Client(path) as client,
        pytest.raises(errors.NoDaemonError, match="not a message of mirrord"),
    ):
        client.status()


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_comes_back_as_its_class_with_its_facts(path: Path) -> None:
    """The same class on both ends of the socket."""
    routes: Any = {
        ("GET", "/v1/mirrors/psf__requests"): lambda h: h.problem(
            404, "mirror-not-found", mirror="psf__requests"
        )
    }
    with (
        serving(path, routes),
        Client(path) as client,
        pytest.raises(errors.MirrorNotFoundError) as caught,
    ):
        client.get_mirror("psf/requests")
    assert (caught.value.hint, caught.value.facts) == ("try", {"mirror": "psf__requests"})


def test_an_error_of_a_newer_daemon_comes_back_as_its_family(path: Path) -> None:
    """Its HTTP status says which."""
    routes: Any = {("GET", "/v1/status"): lambda h: h.problem(409, "quite-new")}
    with serving(path, routes), Client(path) as client, pytest.raises(errors.ConflictError):
        client.status()


def test_a_degraded_daemon_answers_with_its_health(path: Path) -> None:
    """503 is no error here."""
    body = {**HEALTH, "status": "degraded", "reasons": ["disk full"]}
    with (
        serving(path, {("GET", "/v1/health"): lambda h: h.answer(body, 503)}),
        Client(path) as client,
    ):
        assert client.health().reasons == ["disk full"]


# -- checkouts --------------------------------------------------------------------------------------------------------


def test_a_checkout_is_released_at_the_end_of_its_block(path: Path) -> None:
    """The example of the design, word for word."""
    with serving(path, CHECKOUT_ROUTES) as server:
        with Client(path) as mirrord, mirrord.checkout("psf__requests-2317") as checkout:
            assert checkout.path == Path(str(LEASE["path"]))
            assert checkout.diff() == b"diff \xff\n"
            assert checkout.reset().head == COMMIT
            assert checkout.commit == "c" * 40
            assert checkout.renew().hour == 3
        assert server.asked[-1] == ("DELETE", CHECKOUT)
    assert b"psf__requests-2317" in server.seen[0].body


@pytest.mark.parametrize("ttl", [timedelta(minutes=5), 300, 300.0, "5m", "300s"])
def test_a_lease_is_asked_for_in_any_spelling_of_a_duration(
    path: Path, ttl: timedelta | float | str
) -> None:
    """In seconds on the wire; what is no duration is an error of ours before anything is sent."""
    with serving(path, CHECKOUT_ROUTES) as server, Client(path) as client:
        with client.checkout("x", ttl=ttl) as checkout:
            checkout.renew(ttl)
        assert [json.loads(seen.body)["ttl"] for seen in server.seen if seen.body] == [300, 300]
        with pytest.raises(
            mirrord.MirrordError, match="cannot read a ttl: 'soon' is not a duration"
        ):
            client.checkout("x", ttl="soon")


def test_a_checkout_is_released_when_its_block_fails(path: Path) -> None:
    """The failure goes on its way; a release that fails too is only noted."""
    routes: Any = {
        **CHECKOUT_ROUTES,
        ("DELETE", CHECKOUT): lambda h: h.problem(409, "checkout-busy"),
    }
    with (
        serving(path, routes),
        Client(path) as client,
        pytest.raises(ZeroDivisionError) as caught,
        client.checkout("x"),
    ):
        1 / 0  # noqa: B018
    assert "could not release" in caught.value.__notes__[0]


def test_releasing_what_has_expired_is_nothing(path: Path) -> None:
    """The lease is over either way."""
    routes: Any = {
        **CHECKOUT_ROUTES,
        ("DELETE", CHECKOUT): lambda h: h.problem(404, "checkout-not-found"),
    }
    with serving(path, routes), Client(path) as client, client.checkout("x"):
        pass


def test_a_patch_is_the_body_or_a_name(path: Path) -> None:
    """`@test_patch` stays on the daemon's side."""
    with serving(path, CHECKOUT_ROUTES) as server, Client(path) as client:
        checkout = client.checkout(
            mirror="psf/requests", commit="main", view=View.GRADER, ttl=timedelta(minutes=1)
        )
        assert checkout.apply(b"diff", strategy=ApplyStrategy.TOLERANT) is FoundStrategy.CRLF
        assert checkout.apply("@test_patch", reverse=True) is FoundStrategy.EXACT
    assert [request.body for request in server.seen[1:]] == [b"diff", b""]
    query = "reverse=true&named=%40test_patch"
    assert server.asked[-1] == ("POST", f"{CHECKOUT}/apply?{query}")
    assert b'"ttl":60' in server.seen[0].body


def test_an_asynchronous_checkout_can_be_awaited_or_entered(path: Path) -> None:
    """Both `async with client.checkout(…)` and `async with await client.checkout(…)`."""

    async def scene() -> None:
        async with AsyncClient(path) as client:
            async with client.checkout("x") as checkout:
                assert (await checkout.reset()).tree == TREE
            async with await client.checkout("x") as checkout:
                assert await checkout.diff() == b"diff \xff\n"

    with serving(path, CHECKOUT_ROUTES) as server:
        anyio.run(scene)
    assert [command for command, _ in server.asked] == [
        "POST",
        "POST",
        "DELETE",
        "POST",
        "GET",
        "DELETE",
    ]


def test_a_cancelled_task_still_releases_its_checkout(path: Path) -> None:
    """The release is shielded."""

    async def scene() -> None:
        async with AsyncClient(path) as client:
            with anyio.CancelScope() as scope:
                async with client.checkout("x"):
                    scope.cancel()
                    await anyio.sleep_forever()

    with serving(path, CHECKOUT_ROUTES) as server:
        anyio.run(scene)
    assert server.asked[-1] == ("DELETE", CHECKOUT)


# -- datasets, operations, events -------------------------------------------------------------------------------------


def test_a_dataset_file_is_streamed_and_its_progress_told(path: Path, tmp_path: Path) -> None:
    """It is never in memory as a whole."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"x" * 600_000)
    seen: list[Progress] = []
    with (
        serving(path, {("POST", "/v1/datasets"): lambda h: h.answer(OPERATION, 202)}) as server,
        Client(path) as client,
    ):
        client.import_dataset(file, name="mine", progress=seen.append)
    assert server.seen[0].body == file.read_bytes()
    assert server.asked == [("POST", "/v1/datasets?filename=rows.jsonl&name=mine")]
    assert (seen[-1].done, seen[-1].total, len(seen)) == (600_000, 600_000, 3)


def _operations(*states: dict[str, Any]) -> dict[tuple[str, str], Any]:
    left = list(states)
    return {
        ("GET", "/v1/operations/op1"): lambda h: h.answer(
            {**OPERATION, **(left.pop(0) if len(left) > 1 else left[0])}
        )
    }


def test_waiting_sees_progress_and_answers_the_result(path: Path) -> None:
    """Each answer is shown on the way."""
    seen: list[str] = []
    with (
        serving(path, _operations({}, {"state": "done", "result": {"n": 1}})),
        Client(path) as client,
    ):
        done = client.wait("op1", progress=lambda operation: seen.append(operation.state))
    assert (done.result, seen) == ({"n": 1}, ["running", "done"])


def test_waiting_raises_what_the_operation_failed_with(path: Path) -> None:
    """As the daemon would have raised it."""
    problem = {
        "type": "t",
        "title": "t",
        "status": 502,
        "code": "upstream-throttled",
        "detail": "slow down",
        "hint": None,
        "retry_after": 9,
    }
    routes = _operations({"state": "failed", "error": problem})
    with (
        serving(path, routes),
        Client(path) as client,
        pytest.raises(errors.UpstreamThrottledError, match="slow down") as caught,
    ):
        client.wait("op1")
    assert caught.value.facts == {"retry_after": 9}


def test_waiting_for_a_cancelled_operation_is_an_error(path: Path) -> None:
    """Whoever cancelled it."""
    with (
        serving(path, _operations({"state": "cancelled"})),
        Client(path) as client,
        pytest.raises(errors.CancelledError),
    ):
        client.wait("op1")


def test_waiting_for_an_operation_that_a_restart_ended_is_an_error(path: Path) -> None:
    """Operations are forgotten at a restart; one that was never known is not found."""
    answers: list[Any] = [
        lambda h: h.answer(OPERATION),
        lambda h: h.problem(404, "not-found"),
    ]
    routes: Any = {
        ("GET", "/v1/operations/op1"): lambda h: (
            answers.pop(0) if len(answers) > 1 else answers[0]
        )(h)
    }
    with serving(path, routes), Client(path) as client:
        with pytest.raises(errors.CancelledError, match="restarted"):
            client.wait("op1")
        with pytest.raises(errors.NotFoundError):
            client.wait("op1")


@pytest.mark.parametrize("timeout", [timedelta(milliseconds=30), 0.03, 0])
def test_waiting_has_a_bound_if_one_is_given(path: Path, timeout: timedelta | float) -> None:
    """The operation goes on."""
    with (
        serving(path, _operations({})),
        Client(path, timeout=60, patience=1) as client,
        pytest.raises(errors.DeadlineError, match="still running"),
    ):
        client.wait("op1", timeout=timeout)


def _events(*numbers: int) -> Any:
    """With what Unicode calls the end of a line within each, which ends none."""

    def stream(handler: Handler) -> None:
        facts = '"boot": "boot", "at": "2026-01-01T00:00:00Z", "name": "a.b", "fields": {"text": "a\u2028b\x85c"}'
        text = "".join(f'id: boot:{n}\ndata: {{"id": {n}, {facts}}}\n\n' for n in numbers)
        handler.die(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: following\n\n"
            + text.encode()
        )

    return stream


def test_following_events_goes_on_behind_the_last_after_a_restart(path: Path) -> None:
    """With Last-Event-ID, so that none is missed and none comes twice."""
    streams = [_events(1, 2), _events(3)]
    with (
        serving(path, {("GET", "/v1/events"): lambda h: streams.pop(0)(h)}) as server,
        Client(path) as client,
    ):
        numbers = []
        for event in client.events():
            numbers.append(event.id)
            if event.id == 3:
                break
    assert numbers == [1, 2, 3]
    assert [request.headers.get("last-event-id") for request in server.seen] == [None, "boot:2"]


def test_events_without_following_are_what_is_remembered(path: Path) -> None:
    """From the first one, to an end."""

    async def scene() -> list[int]:
        async with AsyncClient(path) as client:
            return [event.id async for event in client.events(follow=False)]

    with serving(path, {("GET", "/v1/events"): _events(1, 2, 3)}) as server:
        assert anyio.run(scene) == [1, 2, 3]
    assert server.seen[0].path == "/v1/events?follow=false"
    assert "last-event-id" not in server.seen[0].headers


# -- a daemon that has too much to do ---------------------------------------------------------------------------------


def _refusing(*answers: tuple[int, str, float | None]) -> dict[tuple[str, str], Any]:
    """Refuses releases with these, one after the other, then does as it is asked."""
    left = list(answers)

    def answer(handler: Handler) -> None:
        if not left:
            return handler.answer(None, status=204)
        status, code, retry_after = left.pop(0)
        return handler.problem(status, code, retry_after=retry_after)

    return {("DELETE", "/v1/checkouts/x"): answer}


def test_a_refused_request_is_sent_again_when_the_daemon_said(path: Path) -> None:
    """Whatever its method: it did not start."""
    refusals = (429, "too-many-requests", 0.01), (503, "overloaded", 0.01)
    with serving(path, _refusing(*refusals)) as server, Client(path) as client:
        client.release_checkout("x")
        assert len(server.seen) == 3


def test_a_refused_request_is_raised_when_asked_for(path: Path) -> None:
    """After so many more."""
    refusals = [(429, "too-many-requests", 0.01)] * 3
    with serving(path, _refusing(*refusals)) as server:
        with Client(path, retries=0) as client, pytest.raises(errors.TooManyRequestsError):
            client.release_checkout("x")
        assert len(server.seen) == 1
        with Client(path, retries=1) as client, pytest.raises(errors.TooManyRequestsError):
            client.release_checkout("x")
        assert len(server.seen) == 3


def test_a_refused_request_is_not_sent_again_after_the_timeout(path: Path) -> None:
    """What the daemon asks for is longer than the client waits."""
    with (
        serving(path, _refusing((429, "too-many-requests", 60))) as server,
        Client(path, timeout=timedelta(seconds=5)) as client,
    ):
        with pytest.raises(errors.TooManyRequestsError):
            client.release_checkout("x")
        assert len(server.seen) == 1


def test_a_refusal_that_names_no_time_is_raised(path: Path) -> None:
    """As is any other error of the family."""
    answers = (503, "overloaded", None), (503, "limit-reached", 0.01)
    with serving(path, _refusing(*answers)), Client(path) as client:
        for kind in (errors.OverloadedError, errors.LimitReachedError):
            with pytest.raises(kind):
                client.release_checkout("x")


def test_the_asynchronous_client_comes_again_too(path: Path) -> None:
    """For streams as well, of which nothing was sent."""
    answers: list[Any] = [
        lambda h: h.problem(429, "too-many-requests", retry_after=0.01),
        lambda h: h.answer("x"),
    ]
    routes = {("GET", "/v1/openapi.json"): lambda h: answers.pop(0)(h)}
    with serving(path, routes) as server:

        async def follow() -> None:
            async with (
                AsyncClient(path) as client,
                client._connection.stream("openapi.json") as (head, _),
            ):
                assert head.status == 200

        anyio.run(follow)
        assert len(server.seen) == 2
