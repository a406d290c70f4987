"""What the daemon does on its own or at length: the kinds of background work, when each is due, templates made ahead of need."""
