"""The handlers: a few lines each between a checked request and the engine, by subject."""
