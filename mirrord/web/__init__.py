"""The read-only page (`[web] listen`), for operators; whoever reaches the port reads it."""
