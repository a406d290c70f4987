"""git and libgit2: one module starts git, one package uses pygit2, one keeps the workers."""
