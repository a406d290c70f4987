"""What daemons on many machines share: mirrors as packs and manifests in an object store."""

from importlib import import_module
from types import ModuleType

from ..errors import StoreUnavailableError


def load(module: str) -> ModuleType:
    """Import a module of this package that uses the store.

    Only where a store is used: it takes 0.1 s, and the library is an extra. Raises
    StoreUnavailableError without that.
    """
    try:
        return import_module(f"{__name__}.{module}")
    except ImportError as error:
        hint = "pip install 'mirrord[fleet]'"
        reason = "cannot use the store: obstore is not installed"
        raise StoreUnavailableError(reason, hint=hint) from error
