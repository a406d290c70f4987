"""git's modes of a tree's entries (`git help fast-import`)."""

DIRECTORY = 0o040000
REGULAR = 0o100644
EXECUTABLE = 0o100755
SYMLINK = 0o120000
SUBMODULE = 0o160000

# S_IFMT of inode(7), and its value for files: old commits have files with mode 0o100664
KIND, FILE = 0o170000, 0o100000


def file_mode(permissions: int) -> int:
    """Return the mode of a regular file, as git reduces it: executable by its owner or not."""
    return EXECUTABLE if permissions & 0o100 else REGULAR
