"""git and libgit2: git processes, objects, worker processes, and turns for them."""

# the header of a commit that stands for one of a shallow upstream, before that one's id
WITHOUT_PARENTS = b"mirrord-without-parents "
