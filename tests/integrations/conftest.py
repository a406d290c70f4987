"""One daemon with one instance, for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness_daemon import HarnessLab, harness_lab


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HarnessLab]:
    with harness_lab(tmp_path_factory.mktemp("harness")) as made:
        yield made


@pytest.fixture
def lab(served: HarnessLab) -> Iterator[HarnessLab]:
    yield served
    assert served.client.list_checkouts() == [], "a harness left its checkout"
