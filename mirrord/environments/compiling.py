"""Compile the modules below a directory: `python -c PROGRAM DIRECTORY CACHE`, in a build.

Files of another build with the same path and content are compiled already: their bytecode is in
CACHE. The environment's Python runs this, from 3.7 on.
"""

import hashlib
import os
import py_compile
import shutil
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source

# with pip itself, half of the work: a project's tests do not import the tests of packages
_LEFT_OUT = {"__pycache__", "test", "tests"}


def compile_below(root: str, cache: str) -> None:
    os.makedirs(cache, exist_ok=True)
    for above, directories, names in os.walk(root):
        inner = set(directories) - _LEFT_OUT
        if os.path.basename(above).endswith("-packages"):
            inner.discard("pip")
        directories[:] = sorted(inner)
        for name in names:
            if name.endswith(".py"):
                _compile(os.path.join(above, name), cache)


def _compile(source: str, cache: str) -> None:
    with open(source, "rb") as file:
        content = file.read()
    named = b"%s\0%s\0%s" % (MAGIC_NUMBER, os.fsencode(source), content)
    made = os.path.join(cache, hashlib.sha256(named).hexdigest())
    if not os.path.exists(made):
        # it appears by a rename: two builds may share the cache
        # Not by times, which are not kept, and an agent may edit a package. Equal files compile to
        # equal bytes, which environments share.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        try:
            py_compile.compile(source, made, source, doraise=True, invalidation_mode=mode)
        except (py_compile.PyCompileError, ValueError, RecursionError):  # a template of a module
            return
    target = cache_from_source(source)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(made, target)


if __name__ == "__main__":
    compile_below(*sys.argv[1:])
