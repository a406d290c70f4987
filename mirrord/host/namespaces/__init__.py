"""User and mount namespaces: what a host allows, and the home of an ordinary user's daemon."""
