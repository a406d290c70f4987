"""The host: raw system calls and what else only Linux knows, one module per subject."""
