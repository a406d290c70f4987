"""Raw HTTP: every malformed request gets an answer that names the fault, and the daemon stays up."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anyone import BARE_PYTHON, NOBODY
from daemons import Daemon, daemon, parse_response
from waiting import BOUND_S

from mirrord.api.table import ENDPOINTS
from mirrord.errors import MirrordError, iter_errors
from mirrord.host.peers import Role
from mirrord.protocol import RESULTS


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    """One daemon for all tests of this module."""
    with daemon() as made:
        yield made
        assert made.stop() == 0


def problem(raw: tuple[int, dict[str, str], bytes]) -> dict[str, Any]:
    status, headers, body = raw
    assert headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = json.loads(body)
    assert found["status"] == status
    assert found.keys() >= {"type", "title", "code", "detail", "hint"}
    return found


def test_an_unknown_path_is_a_problem(running: Daemon) -> None:
    """A problem rather than a framework's page."""
    assert problem(running.get("/v1/nowhere"))["code"] == "not-found"
    assert problem(running.get("/v1/mirrors/"))["code"] == "not-found"


def test_an_unknown_method_is_a_problem(running: Daemon) -> None:
    """405, for paths with and without parameters."""
    assert problem(running.request("PUT", "/v1/health"))["status"] == 405
    assert problem(running.request("PATCH", "/v1/mirrors/a__b"))["status"] == 405


def test_head_is_get_without_the_body(running: Daemon) -> None:
    """If the answer is JSON; for streams the answer names the allowed methods."""
    for path in ("/v1/health", "/v1/status", "/v1/checkouts"):
        status, headers, body = running.request("HEAD", path)
        assert (status, headers["content-type"], body) == (200, "application/json", b"")
        assert int(headers["content-length"]) > 1
    assert running.request("HEAD", "/v1/mirrors/no__where")[0] == 404
    status, headers, body = running.request("HEAD", "/v1/events")
    assert (status, headers["allow"], body) == (405, "GET", b"")
    assert running.request("PUT", "/v1/checkouts")[1]["allow"] == "GET, HEAD, POST"


def test_every_answer_has_a_request_id(running: Daemon) -> None:
    """The client's own if it is valid, else a new one; also for errors."""
    assert running.get("/v1/health", **{"X-Request-Id": "mine-1"})[1]["x-request-id"] == "mine-1"
    assert running.get("/v1/nowhere", **{"X-Request-Id": "mine-2"})[1]["x-request-id"] == "mine-2"
    assert running.get("/v1/health", **{"X-Request-Id": "no good"})[1]["x-request-id"] != "no good"


def test_all_faults_of_a_body_are_reported_at_once(running: Daemon) -> None:
    """With the key of each."""
    found = problem(
        running.request("POST", "/v1/checkouts", {"ttl": -1, "history": "none", "surprise": 1})
    )
    assert found["code"] == "invalid-request"
    assert {fault["key"] for fault in found["faults"]} == {"ttl", "history", "surprise"}


@pytest.mark.parametrize("ttl", ["2", "two hours", "", "0", 0, True, [], "999999999w", "2h "])
def test_a_time_that_is_none_is_refused(running: Daemon, ttl: object) -> None:
    """A number is seconds; a string has a unit."""
    found = problem(running.request("POST", "/v1/checkouts", {"instance": "a", "ttl": ttl}))
    assert [fault["key"] for fault in found["faults"]] == ["ttl"]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"\xff\xfe", b'{"ttl": NaN}', b'"x"', b"[" * 100_000]
)
def test_a_body_that_is_not_the_json_asked_for_is_a_problem(running: Daemon, body: bytes) -> None:
    """Malformed, of the wrong type, not UTF-8, nested without end."""
    assert problem(running.request("POST", "/v1/checkouts", body))["code"] == "invalid-request"


@pytest.mark.parametrize(
    "path", ["/v1/events?after=1&after=2", "/v1/events?surprise=1", "/v1/events?follow=perhaps"]
)
def test_a_bad_query_is_a_problem(running: Daemon, path: str) -> None:
    """Unknown, mistyped and duplicate parameters are refused as in a body."""
    found = problem(running.get(path))
    assert (found["code"], bool(found["hint"])) == ("invalid-request", True)


def test_a_body_over_the_limit_is_refused_by_its_announced_length(running: Daemon) -> None:
    """Before the body is read."""
    with running.connect() as connection:
        connection.sendall(
            b"POST /v1/checkouts HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
        )
        assert problem(parse_response(_until_closed(connection)))["code"] == "body-too-large"


def test_a_chunked_body_over_the_limit_is_refused_on_the_way(running: Daemon) -> None:
    """A body without a length is counted."""
    with running.connect() as connection:
        connection.sendall(
            b"POST /v1/checkouts HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(40):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert problem(parse_response(_until_closed(connection)))["code"] == "body-too-large"


def test_half_a_body_leaves_nothing_behind(running: Daemon) -> None:
    """No file is left in quarantine, and the daemon still serves."""
    with running.connect() as connection:
        head = b"POST /v1/datasets?filename=x.jsonl HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n"
        connection.sendall(head + b"x" * 2_000_000)
    assert running.get("/v1/health")[0] == 200
    for _ in range(100):
        if not list((running.state_dir / "quarantine").iterdir()):
            return
        running.get("/v1/health")
    pytest.fail("the half body is still in quarantine")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_garbage_is_answered_with_a_problem_and_hung_up_on(running: Daemon, raw: bytes) -> None:
    """TLS, garbage, and ambiguous heads."""
    assert problem(parse_response(running.exchange(raw)))["code"] == "invalid-request"


@pytest.mark.parametrize(
    "filler", [b"x-%d: y\r\n", b"x" * 1000], ids=["many headers", "one endless header"]
)
def test_a_head_without_end_is_cut_off(running: Daemon, filler: bytes) -> None:
    """64 KiB are enough for any request."""
    with running.connect() as connection:
        connection.sendall(b"GET /v1/health HTTP/1.1\r\nx: ")
        received = b""
        try:
            for n in range(100_000):
                connection.sendall(filler % n if b"%" in filler else filler)
        except (BrokenPipeError, ConnectionResetError):
            received = _until_closed(connection)
        assert problem(parse_response(received))["code"] == "invalid-request"


def test_requests_on_one_connection_are_answered_in_order(running: Daemon) -> None:
    """Keep-alive and pipelining."""
    request = b"GET /v1/health HTTP/1.1\r\nhost: x\r\nx-request-id: r-%d\r\n\r\n"
    last = (
        b"GET /v1/health HTTP/1.1\r\nhost: x\r\nx-request-id: r-last\r\nconnection: close\r\n\r\n"
    )
    raw = running.exchange(b"".join(request % n for n in range(20)) + last)
    identities = [
        line.split(b": ")[1] for line in raw.split(b"\r\n") if line.startswith(b"x-request-id")
    ]
    assert identities == [b"r-%d" % n for n in range(20)] + [b"r-last"]


@pytest.mark.skipif(
    "COVERAGE_AREA" in os.environ, reason="a tracer cannot start in 64 threads at once"
)
def test_64_clients_at_once_all_get_their_answers(running: Daemon) -> None:
    """No request is lost or refused."""
    failures: list[object] = []

    def ask() -> None:
        for _ in range(10):
            status, _, body = running.get("/v1/health")
            if status != 200 or json.loads(body)["status"] != "ok":
                failures.append((status, body))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert not failures


@pytest.mark.root
def test_a_stranger_may_ask_for_health_and_nothing_else(running: Daemon) -> None:
    """Every other endpoint answers not-allowed before any look-up."""
    answers = as_nobody(running.socket, [(e.method, e.path) for e in ENDPOINTS])
    codes = {f"{e.method} {e.path}": code for e, code in zip(ENDPOINTS, answers, strict=True)}
    assert codes.pop("GET /v1/health") is None
    assert set(codes.values()) == {"not-allowed"}


def as_nobody(path: Path, requests: list[tuple[str, str]]) -> list[str | None]:
    """Error codes that a process of another user gets; None for success."""
    script = """
import json, socket, sys
for method, path in json.loads(sys.argv[2]):
    s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
    s.sendall(f"{method} {path} HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n".encode())
    body = b"".join(iter(lambda: s.recv(65536), b"")).partition(b"\\r\\n\\r\\n")[2]
    print(json.dumps(json.loads(body).get("code")))
"""
    command = [BARE_PYTHON, "-c", script, str(path), json.dumps(requests)]
    done = subprocess.run(
        command,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_refusal_says_what_was_refused() -> None:
    """The message has the verb and noun of the endpoint."""
    assert [e.name for e in ENDPOINTS if e.access is not Role.STRANGER and "_" not in e.name] == []


def test_the_document_has_every_endpoint_of_the_table(running: Daemon) -> None:
    """Paths, parameters, bodies and problems."""
    document = running.json("GET", "/v1/openapi.json")
    documented = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert documented == {(e.method, e.path) for e in ENDPOINTS}
    checkout = document["paths"]["/v1/checkouts"]["post"]
    assert checkout["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/StartCheckout"
    )
    assert checkout["responses"]["201"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/Checkout"
    )
    assert "application/problem+json" in checkout["responses"]["default"]["content"]
    patch = document["paths"]["/v1/checkouts/{id}/apply"]["post"]
    assert set(patch["requestBody"]["content"]) == {
        "application/octet-stream"
    }  # generators skip an endpoint for others
    assert patch["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/ApplyAnswer"
    )
    assert "patch-conflict" in patch["responses"]["409"]["x-codes"]


def test_the_document_says_which_problems_each_endpoint_answers_with(running: Daemon) -> None:
    """By status, with their media type, the schema Problem and known codes."""
    document = running.json("GET", "/v1/openapi.json")
    codes = {(error.http_status, error.code) for error in iter_errors(MirrordError)}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            problems = {
                status: each
                for status, each in described["responses"].items()
                if status == "default" or int(status) >= 400
            }
            assert {"default", "400", "500", "503"} <= set(problems), (method, path)
            for status, each in problems.items():
                expected = {"application/problem+json"} | (
                    {"application/json"} if (path, status) == ("/v1/health", "503") else set()
                )
                assert set(each["content"]) == expected
                assert each["content"]["application/problem+json"]["schema"] == {
                    "$ref": "#/components/schemas/Problem"
                }
                assert (
                    {(int(status), code) for code in each.get("x-codes", [])} <= codes
                    if status != "default"
                    else True
                )
    problem = document["components"]["schemas"]["Problem"]
    assert problem["additionalProperties"] is True
    assert set(problem["properties"]) == {"type", "title", "status", "code", "detail", "hint"}


def test_every_reference_of_the_document_is_in_it(running: Daemon) -> None:
    """Generators fail on dangling references."""
    text = running.get("/v1/openapi.json")[2].decode()
    schemas = json.loads(text)["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(schemas)
    assert not re.search(r'"#/(?!components/schemas/)', text)


def test_the_document_has_a_schema_for_the_result_of_each_kind_of_operation(
    running: Daemon,
) -> None:
    """One of the results, or null while it runs."""
    schemas = running.json("GET", "/v1/openapi.json")["components"]["schemas"]
    result = schemas["Operation"]["properties"]["result"]
    assert {each.get("$ref", each.get("type")) for each in result["oneOf"]} == {
        "null",
        *(f"#/components/schemas/{message.__name__}" for message in RESULTS.values()),
    }
    for message in RESULTS.values():
        assert set(schemas[message.__name__]["properties"]) == set(get_type_hints(message)) - {
            name for name in get_type_hints(message) if name.startswith("_")
        }


def test_metrics_are_prometheus_text(running: Daemon) -> None:
    """Requests by endpoint and status, and gauges."""
    running.get("/v1/health")
    text = running.get("/metrics")[2].decode()
    assert 'mirrord_requests_total{endpoint="health",status="200"}' in text
    assert "mirrord_checkouts 0.0" in text
    assert "mirrord_up 1.0" in text


def test_an_operation_that_does_not_exist_is_a_problem(running: Daemon) -> None:
    """Its own code."""
    assert problem(running.get("/v1/operations/nope"))["code"] == "not-found"
    assert problem(running.request("DELETE", "/v1/operations/nope"))["code"] == "not-found"


def test_events_are_followed_and_resumed(running: Daemon) -> None:
    """From the last id, without gaps and duplicates."""
    first = _next_events(running, "0", 1)
    running.request("POST", "/v1/reload")
    running.request("POST", "/v1/reload")
    seen = _next_events(running, first[-1]["sse_id"], 1)
    more = _next_events(running, seen[-1]["sse_id"], 1)
    assert [event["id"] for event in seen + more] == [first[-1]["id"] + 1, first[-1]["id"] + 2]


def test_events_of_another_boot_start_over(running: Daemon) -> None:
    """An id from before a restart means all remembered events."""
    running.request("POST", "/v1/reload")
    assert _next_events(running, "deadbeef:999999", 1)[0]["id"] == 1


def test_events_without_follow_end(running: Daemon) -> None:
    """The answer has the remembered events and ends."""
    assert (
        running.get("/v1/events?follow=false")[2]
        == running.get("/v1/events?follow=false&after=0")[2]
    )
    status, headers, body = running.get("/v1/events?follow=false&after=0")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    assert body.count(b"data: ") >= 1


def _next_events(running: Daemon, after: str, count: int) -> list[dict[str, Any]]:
    with running.connect() as connection:
        head = f"GET /v1/events HTTP/1.1\r\nhost: x\r\nlast-event-id: {after}\r\n\r\n"
        connection.sendall(head.encode())
        raw = b""
        while raw.count(b"\ndata: ") < count or not raw.endswith(b"\n\n\r\n"):
            raw += connection.recv(65536)
    lines = raw.decode().split("\n")
    identities = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")
    ]
    return [
        {**event, "sse_id": identity} for event, identity in zip(events, identities, strict=True)
    ][:count]


def _until_closed(connection: socket.socket) -> bytes:
    raw = b""
    try:
        while chunk := connection.recv(65536):
            raw += chunk
    except ConnectionResetError:
        pass
    return raw
