"""HTTP over the Unix socket: the table of endpoints, their handlers, and the connections."""
