"""A pytest plugin whose fixture `checkout` is what a test's mark names: `-p mirrord.pytest`.

    @pytest.mark.checkout("psf__requests-2317")
    def test_the_agent(checkout):
        run_agent(checkout.path)
        assert b"retries" in checkout.diff()

The daemon is that of MIRRORD_SOCKET or of the configuration.
"""

from collections.abc import Iterator

import pytest

from .client._sync import Checkout, Client


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    mark = "checkout(instance, **options): what the fixture `checkout` is, as for Client.checkout"
    config.addinivalue_line("markers", mark)


@pytest.fixture(scope="session")
def mirrord_client() -> Iterator[Client]:
    """A client of the daemon, for all tests of a process."""
    with Client() as client:
        yield client


@pytest.fixture
def checkout(request: pytest.FixtureRequest, mirrord_client: Client) -> Iterator[Checkout]:
    """A checkout of the test's own, released after it, or by the end of a process that was killed.

    Raises what Client.checkout raises, and UsageError for a test without the mark.
    """
    mark = request.node.get_closest_marker("checkout")
    if mark is None:
        raise pytest.UsageError("mark the test with @pytest.mark.checkout(INSTANCE)")
    with mirrord_client.checkout(*mark.args, **{"bind": "process", **mark.kwargs}) as taken:
        yield taken
