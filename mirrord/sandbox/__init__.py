"""Sandboxes: what they show, their processes and their git. Part of the client."""
