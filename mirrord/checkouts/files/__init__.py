"""Trees of files on disk: written, scanned, hashed and recorded in a manifest. Knows nothing of leases."""
