"""What each endpoint does: a few lines between a checked request and the engine. By subject."""
