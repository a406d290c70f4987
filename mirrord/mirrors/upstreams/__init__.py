"""What mirrors are fetched from: addresses, limits of hosts, credentials."""
