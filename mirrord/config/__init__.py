"""The configuration: the table of settings, their values, the reader and the writer of its file.

An invalid file is refused whole, and the daemon keeps its settings.
"""

from .credentials import AppSettings, CredentialSettings
from .reading import load
from .settings import (
    AccessSettings,
    AuditSettings,
    CheckoutSettings,
    DatasetSettings,
    DockerSettings,
    EnvironmentSettings,
    MirrorSettings,
    Settings,
    StoreSettings,
    UpstreamSettings,
    compare,
    merge_live,
    setting_keys,
)
from .writing import toml_lines

__all__ = [
    "AccessSettings", "AppSettings", "AuditSettings", "CheckoutSettings", "CredentialSettings",
    "DatasetSettings", "DockerSettings",
    "EnvironmentSettings", "MirrorSettings", "Settings", "StoreSettings", "UpstreamSettings",
    "compare", "load", "merge_live", "setting_keys", "toml_lines",
]  # fmt: skip
