"""The messages: the client without pydantic reads what pydantic reads and the daemon wrote."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import mirrord
from mirrord import errors, protocol
from mirrord.protocol import Answer, MalformedError, Message, Problem, Request, to_bytes


def _messages(root: type[Message]) -> list[type[Message]]:
    return [
        each
        for each in vars(protocol).values()
        if isinstance(each, type) and issubclass(each, root) and each is not root
    ]


ANSWERS, REQUESTS = _messages(Answer), _messages(Request)


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a member's type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return st.lists(_values(arguments[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=2)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([_values(argument) for argument in arguments])
    if kind is NoneType:
        return st.none()
    if kind is Any:
        return st.one_of(
            st.none(), st.booleans(), st.integers(), st.text(), st.lists(st.text(), max_size=2)
        )
    if issubclass(kind, Message):
        return _instances(kind)
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    if kind is datetime:
        zones = st.timedeltas(timedelta(hours=-12), timedelta(hours=12)).map(
            lambda d: timezone(timedelta(minutes=d // timedelta(minutes=1)))
        )
        return st.datetimes(min_value=datetime(1970, 1, 1), timezones=zones)  # noqa: DTZ001
    return {
        str: st.text(),
        int: st.integers(-(2**53), 2**53),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
    }[kind]


@cache
def _instances(message: type[Message]) -> st.SearchStrategy[Message]:
    members = {
        name: _values(hint)
        for name, hint in get_type_hints(message).items()
        if not name.startswith("_")
    }
    if message is Problem:
        members["facts"] = st.dictionaries(st.sampled_from(["faults", "retry_after"]), _values(Any))
    return st.fixed_dictionaries(members).map(lambda given: message(**given))


# pydantic reads facts that are members of their own only as such
_WITH_PROBLEMS = {
    Problem,
    protocol.Status,
    protocol.Activity,
    protocol.Restored,
    protocol.TurnsAnswer,
}
_READ_BY_PYDANTIC = {
    it for it in ANSWERS if "Problem" not in str(get_type_hints(it)) and it not in _WITH_PROBLEMS
}


@pytest.mark.parametrize("message", ANSWERS + REQUESTS, ids=lambda message: message.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_a_message_comes_back_from_json_as_it_was(
    message: type[Message], data: st.DataObject
) -> None:
    """On both ends: an answer is read by our reader, a request by pydantic.

    pydantic, which makes the document that describes the messages, reads answers too.
    """
    sent = data.draw(_instances(message))  # type: ignore[arg-type]  # the class is hashable, its instances are not
    assert message.from_json(json.loads(to_bytes(sent))) == sent
    assert pickle.loads(pickle.dumps(sent)) == copy.copy(sent) == sent
    if message in _READ_BY_PYDANTIC:
        assert TypeAdapter(message).validate_json(to_bytes(sent)) == sent


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "Input should be an object"),
        ({}, "counts: Field required"),
        ({"id": 5}, "id: Input should be a string"),
        ({"id": "a", "level": "deep"}, "level: Input should be 'quick', 'closure' or 'content'"),
        ({"id": "a", "level": "quick", "mirrors": "b"}, "mirrors: Input should be an array"),
        ({"id": "a", "level": "quick", "mirrors": ["b", 5]}, "mirrors.1: Input should be a string"),
        ({"id": "a", "counts": {"ok": True}}, "counts.ok: Input should be an integer"),
        ({"id": "a", "counts": {"well": 1}}, "counts: Input should be 'ok'"),
        ({"id": "a", "started_at": 5}, "started_at: Input should be a time in ISO 8601"),
        (
            {"id": "a", "findings": [{"mirror": "m", "state": None}]},
            "findings.0.state: Input should be 'ok'",
        ),
    ],
)
def test_a_fault_is_named_with_its_place(value: Any, said: str) -> None:
    """What came is judged before what is missing."""
    with pytest.raises(MalformedError) as caught:
        protocol.Audit.from_json(value)
    assert str(caught.value).startswith(said)


def test_members_that_a_newer_daemon_adds_are_ignored_and_facts_of_a_problem_are_kept() -> None:
    """An older client reads a newer daemon."""
    health = protocol.Health.from_json({"status": "ok", "version": "1", "mood": "good"})
    assert health == protocol.Health(status="ok", version="1")
    members = {
        "type": "t",
        "title": "t",
        "status": 404,
        "code": "c",
        "detail": "d",
        "hint": None,
        "mirror": "m",
    }
    problem = Problem.from_json(members)
    assert (problem.facts, problem.to_json()) == ({"mirror": "m"}, members)


def test_a_message_is_frozen_checked_and_shares_nothing() -> None:
    """Like a dataclass with `frozen` and `kw_only`."""
    first, second = protocol.StartHeal(), protocol.StartHeal()
    first.mirrors.append("a/b")
    assert second.mirrors == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.mirrors = []  # type: ignore[misc]
    with pytest.raises(TypeError):
        protocol.RestoreRefs()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        protocol.StartHeal(mirror="a/b")  # type: ignore[call-arg]


def test_bytes_that_are_no_text_are_json_all_the_same() -> None:
    """A name in git need not be UTF-8: it is in quotes then, and read back."""
    fault = protocol.RefFault(ref="refs/heads/\udcff", commit="c", reason="ä")
    quoted = '"\\"refs/heads/\\\\377\\""'
    assert f'{{"ref":{quoted},"commit":"c","reason":"ä",'.encode() in to_bytes(fault)
    assert protocol.RefFault.from_json(json.loads(to_bytes(fault))) == fault


def test_requests_refuse_what_they_do_not_know_and_what_is_out_of_bounds() -> None:
    """By pydantic, from the same class; all faults at once."""
    adapter = TypeAdapter(protocol.StartCheckout)
    with pytest.raises(ValueError, match="4 validation errors"):
        adapter.validate_json('{"instance": "", "ttl": -1, "owner": true, "nonsense": 1}')
    assert adapter.validate_json('{"ttl": "5m"}') == protocol.StartCheckout(ttl=300.0)
    schema = adapter.json_schema()
    assert schema["additionalProperties"] is False
    bounds = {"maxLength": 500, "minLength": 1, "type": "string"}
    assert bounds in schema["properties"]["dataset"]["anyOf"]
    assert "seconds, or a duration" in str(schema["properties"]["ttl"])


# -- the public names ------------------------------------------------------------------------------


def test_the_exported_names_are_the_public_ones() -> None:
    """Clients, messages, choices, errors: nothing else and nothing less."""
    told = {each.__name__ for each in errors.iter_errors(errors.MirrordError)}
    of_errors = {"MirrordError", *told.intersection(vars(errors))}
    of_model = {
        name
        for name, each in vars(mirrord.model).items()
        if isinstance(each, type) and issubclass(each, StrEnum)
    }
    of_answers = {message.__name__ for message in ANSWERS} - {"Checkout", "Grade"}
    handles = {"Checkout", "Grade", "AsyncCheckout", "AsyncGrade", "Rehearsal", "AsyncRehearsal"}
    clients = {"AsyncClient", "Client", "__version__"} | handles
    clients |= {"AsyncSandbox", "Sandbox", "Executed"}
    stub = Path(mirrord.__file__).with_suffix(".pyi").read_text()
    exported = set(re.findall(r"(\w+) as \1\b", stub)) | set(
        re.findall(r"^(\w+): ", stub, re.MULTILINE)
    )
    assert exported == of_errors | (of_model - {"StrEnum"}) | of_answers | clients
    assert all(hasattr(mirrord, name) for name in exported)
    assert exported <= set(dir(mirrord))
    with pytest.raises(AttributeError):
        mirrord.Klient  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("code", "foreign"),
    [
        ("import mirrord", {"mirrord.errors", "mirrord.client", "asyncio"}),
        (
            "from mirrord import Client",
            {"mirrord.config", "mirrord.client._async", "asyncio"},
        ),
        (
            "from mirrord import AsyncClient, Client, MirrordError, View, Operation",
            {"mirrord.config", "mirrord.api"},
        ),
    ],
)
def test_a_client_loads_what_it_needs(code: str, foreign: set[str]) -> None:
    """The standard library and ourselves: no package of others."""
    show = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True
    )
    bare = subprocess.run(
        [sys.executable, "-I", "-c", show], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split()) - set(bare.stdout.split())
    assert not loaded & foreign
    tops = {name.partition(".")[0] for name in loaded}
    assert tops <= sys.stdlib_module_names | {"mirrord"}
