"""Trees of files on disk: written, scanned, hashed and recorded. Independent of leases."""
