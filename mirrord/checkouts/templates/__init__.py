"""Templates of overlay checkouts: layers built, proven, kept on record and evicted."""
