"""Trees of files on disk: written, scanned, hashed and recorded. Knows nothing of leases."""
