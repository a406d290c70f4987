"""A mirror as one file, and back: a git bundle (version 2) with a few refs of our own.

`refs/mirrord/records/owner__name` in it is a commit whose tree holds the catalog's knowledge:
`mirror.json`, and a file of rows for each dataset. Plain git lists, verifies, clones and fetches
from it; mirrord is not needed to get the commits out.
"""
