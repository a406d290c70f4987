"""A mirror as one file, and back: a git bundle (version 2) with more refs than usual.

`refs/mirrord/records/owner__name` in it is a commit whose tree holds what the catalog knows: `mirror.json`, and a file of rows
for each dataset. So plain git lists, verifies, clones and fetches from it; to get the commits out takes nothing of mirrord.
"""
