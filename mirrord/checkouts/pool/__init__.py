"""The pool backend: plain trees, changed in place, and the spare ones written ahead."""
