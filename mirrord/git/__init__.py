"""git and libgit2: git processes, objects, worker processes, and turns for them."""
