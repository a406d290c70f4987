"""Files of another user on disk: written, read, compared with a manifest."""
