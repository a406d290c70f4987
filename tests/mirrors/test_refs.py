"""What a mirror takes of the refs that an upstream offers: values only."""

from __future__ import annotations

import pytest

from mirrord.mirrors.refs import is_safe_ref, read_offer
from mirrord.quoting import quote_name

PATTERNS = ("refs/heads/*", "refs/tags/*")
A, B = "a" * 40, "b" * 40


def test_a_name_that_is_also_a_directory_is_taken_and_what_is_below_is_told() -> None:
    """No file system and no git holds both; an upstream that is none of git's can offer them."""
    offer = read_offer(
        [
            f"{A}\trefs/heads/a",
            f"{B}\trefs/heads/a/b",
            f"{B}\trefs/heads/ab",
            f"{B}\trefs/heads/a/b/c",
        ],
        PATTERNS,
    )
    assert offer.refs == {"refs/heads/a": A, "refs/heads/ab": B}
    assert {(fault.ref, fault.commit) for fault in offer.faults} == {
        ("refs/heads/a/b", B),
        ("refs/heads/a/b/c", B),
    }


_HOSTILE = (
    "a..b", "a.lock", "a.lock/b", "a\x7f", "a b", "a~1", "a^", "a:b", "a?", "a[", "a\\b", "a@{1}",
    "a//b", "a/.b", "a.", "a/",
    "x" * 241,
)  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_name_is_a_fault(name: str) -> None:
    """Nothing of it becomes the name of a file; its message is printable."""
    offer = read_offer([f"{A}\trefs/heads/{name}", f"{B}\trefs/heads/main"], PATTERNS)
    assert offer.refs == {"refs/heads/main": B}
    (fault,) = offer.faults
    assert fault.commit == A
    assert quote_name(fault.ref).isprintable()


@pytest.mark.parametrize(
    "line",
    [f"{A}\trefs/mirrord/pins/person/0/{A}", f"{A}\trefs/replace/{B}", f"{A}\trefs/stash",
     f"{A}\trefs/bisect/bad", f"{A}\tHEAD",
     f"{A}\trefs/tags/v1^{{}}", "0\trefs/heads/x", f"{A}g\trefs/heads/x", f"{A} refs/heads/x", "",
     "\t"],
)  # fmt: skip
def test_what_is_not_a_ref_of_theirs_is_not_seen(line: str) -> None:
    """Not even where the patterns name everything."""
    offer = read_offer([line, f"{B}\trefs/heads/main", "ref: refs/heads/main\tHEAD"], ("refs/*",))
    assert (offer.refs, offer.faults, offer.head) == ({"refs/heads/main": B}, [], "refs/heads/main")


def test_a_head_that_is_not_offered_is_none() -> None:
    """A mirror's default branch exists."""
    assert (
        read_offer(["ref: refs/heads/gone\tHEAD", f"{B}\trefs/heads/main"], PATTERNS).head is None
    )


def test_an_offer_holds_what_was_asked_for() -> None:
    """Peeled tags, other namespaces, ours and hostile names stay out; a hostile one is reported."""
    oid = "a" * 40
    taken = ["refs/heads/main", "refs/pull/1/head", "refs/tags/v1"]
    left = ["refs/tags/v1^{}", "refs/pull/1/merge", "refs/mirrord/history", "refs/replace/x"]
    names = [*taken, *left, "refs/heads/a..b", "refs/heads/main/below"]
    lines = ["ref: refs/heads/main\tHEAD", f"{oid}\tHEAD", *(f"{oid}\t{name}" for name in names)]
    offer = read_offer(lines, ["refs/heads/*", "refs/tags/*", "refs/pull/*/head", "refs/*/x"])
    assert sorted(offer.refs) == taken
    assert offer.head == "refs/heads/main"
    assert sorted(fault.ref for fault in offer.faults) == [
        "refs/heads/a..b",
        "refs/heads/main/below",
    ]


@pytest.mark.parametrize(
    "ref",
    [
        "refs/heads/x.lock", "refs/heads/.x", "refs/heads/x y", "refs/heads/x:", "refs/heads//x",
        "refs/heads/@{",
        "refs/heads/x/", "refs/heads/" + "x" * 300, "heads/x", "refs/heads/x\x7f",
    ],
)  # fmt: skip
def test_a_name_that_git_refuses_is_not_safe(ref: str) -> None:
    assert not is_safe_ref(ref)
