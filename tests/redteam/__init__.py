"""Attacks on an installed mirrord, from outside: one line for each, with what stopped it.

`python -m redteam --socket /run/mirrord/mirrord.sock`, as root, from the directory above. Needs the
standard library, git, util-linux, and a daemon that has one mirror with two commits. It makes checkouts for uids that nobody
has, attacks as them, and releases everything. `proofs.md` lists every attack by its name.
"""
