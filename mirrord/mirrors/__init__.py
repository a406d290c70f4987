"""Complete bare copies of upstreams, from which nothing that was once mirrored is ever lost."""
