"""The composition root, and the work that it starts."""
