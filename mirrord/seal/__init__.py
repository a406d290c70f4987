"""Judge any repository against a base commit. Only the command line uses it: no daemon, no worker, no configuration."""
