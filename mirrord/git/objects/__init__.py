"""Git objects through libgit2: the only package that imports pygit2. Synchronous, for workers.

Reads are verified: CorruptObjectError if an object's bytes do not match its id.
"""

import os
import ssl

# pygit2 (1.21) fails to import without OpenSSL's certificates, which no object read needs.
_paths = ssl.get_default_verify_paths()
if not (_paths.cafile or _paths.capath):
    _given = os.environ.get(_paths.openssl_capath_env)
    os.environ[_paths.openssl_capath_env] = "/"
    try:
        import pygit2  # noqa: F401
    finally:
        del os.environ[_paths.openssl_capath_env]
        if _given is not None:
            os.environ[_paths.openssl_capath_env] = _given
