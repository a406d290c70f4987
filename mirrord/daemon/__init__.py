"""The daemon process: its lock, its sockets, its signals, its end. The engine does the rest."""
