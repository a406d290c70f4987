"""The read-only web page (`[web] listen`). Everybody who reaches the port can read it."""
