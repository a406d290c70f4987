"""Several daemons that share mirrors, as packs and manifests in an object store, and a catalog."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import StoreUnavailableError
from ..places import how_to_get


@contextmanager
def with_obstore() -> Iterator[None]:
    """Around an import of what needs obstore, which is an extra and takes 0.1 s to load.

    Raises StoreUnavailableError without the extra.
    """
    try:
        yield
    except ImportError as error:
        reason = "cannot use the store: obstore is not installed"
        raise StoreUnavailableError(reason, hint=how_to_get("fleet")) from error
