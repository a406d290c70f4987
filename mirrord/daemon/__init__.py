"""The process: its start, its one lock, its sockets, its signals, its end. Everything it serves is the engine's."""
