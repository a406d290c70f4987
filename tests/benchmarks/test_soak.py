"""The verdict of the soak: what it counts as a broken promise, and what not."""

from dataclasses import replace

import pytest
from soak_tally import Tally, documented
from soak_watch import Sample, Watch

from mirrord import errors

REST = Sample(
    at=0.0, daemon_mib=90.0, private_mib=70.0, family_mib=130.0, processes=2, descriptors=28, threads=14, mounts=5,
    leases=6, checkouts=6, trash=0, layers=0, quarantine=0, building=0,
)  # fmt: skip


def test_every_error_of_the_product_is_found_in_its_document() -> None:
    product = {each.code: each.http_status for each in errors.iter_errors(errors.MirrordError)}
    assert product.items() <= documented().items()


@pytest.mark.parametrize(
    ("code", "status", "is_broken"),
    [
        ("too-many-requests", 429, False),
        ("too-many-requests", 503, True),
        ("not-found", None, False),
        ("internal", 500, True),
        ("no-such-code", 400, True),
    ],
)
def test_undocumented_answers_and_bugs_break_a_promise(
    code: str, status: int | None, is_broken: bool
) -> None:
    tally = Tally()
    tally.refuse("checkout", code, "it was refused", status)
    assert bool(tally.broken) is is_broken


@pytest.mark.parametrize("name", ["mounts", "leases", "checkouts", "trash", "layers", "quarantine"])
def test_one_more_of_anything_is_a_leak(name: str) -> None:
    watch = Watch(lambda: REST)
    assert not watch.leaks(REST, REST, is_same=True)
    more = replace(REST, **{name: getattr(REST, name) + 1})
    assert watch.leaks(REST, more, is_same=True) == [
        f"{name}: {getattr(REST, name)} before, {getattr(more, name)} after"
    ]


@pytest.mark.parametrize(("mib_a_minute", "is_leak"), [(0.5, False), (20.0, True)])
def test_memory_that_grows_to_the_end_is_a_leak(mib_a_minute: float, is_leak: bool) -> None:
    watch = Watch(lambda: REST)
    watch.samples = [
        replace(REST, at=float(at), private_mib=70 + mib_a_minute * at / 60) for at in range(120)
    ]
    after = replace(watch.samples[-1], private_mib=70 + 2 * mib_a_minute)
    assert bool(watch.leaks(REST, after, is_same=True)) is is_leak
    assert not watch.leaks(REST, after, is_same=False)
