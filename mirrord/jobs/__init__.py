"""Infrastructure of background work: operations, events, watched files."""
