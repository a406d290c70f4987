"""Linux: system calls, mounts, files by descriptor, peers, processes, trash."""
