"""Checkouts: templates, sealed stores, backends, leases, proof."""
