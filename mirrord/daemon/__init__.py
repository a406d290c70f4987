"""The daemon process: state lock, sockets, signals and shutdown, around an engine."""
