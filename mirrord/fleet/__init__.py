"""Several daemons that share mirrors, as packs and manifests in an object store, and a catalog."""

from importlib import import_module
from types import ModuleType

from ..errors import StoreUnavailableError


def load(module: str) -> ModuleType:
    """Import a module of this package that needs obstore, which is an extra and takes 0.1 s.

    Raises StoreUnavailableError without the extra.
    """
    try:
        return import_module(f"{__name__}.{module}")
    except ImportError as error:
        hint = "pip install 'mirrord[fleet]'"
        reason = "cannot use the store: obstore is not installed"
        raise StoreUnavailableError(reason, hint=hint) from error
