"""What checkouts are made from: layers, sealed stores, environments."""
