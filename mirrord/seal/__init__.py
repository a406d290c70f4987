"""The judge of a seal: what a repository holds or leads to beyond a commit and its history."""
