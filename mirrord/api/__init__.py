"""HTTP over the Unix socket: one table of endpoints, what each does, and how bytes and errors cross the wire."""
