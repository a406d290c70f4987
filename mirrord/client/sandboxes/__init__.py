"""Sandboxes, as both clients have them: started here, by the client's process, and no daemon."""
