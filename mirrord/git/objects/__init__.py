"""Git objects through libgit2: the only package that imports pygit2. Sync; called in workers.

Reads are verified: an object whose bytes do not match its id is a CorruptObjectError.
"""

import os
import ssl

# pygit2 (1.21) does not load where OpenSSL's certificates are missing. No object read needs one.
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
