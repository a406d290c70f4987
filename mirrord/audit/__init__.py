"""Audits: can every recorded commit be served, what keeps it alive, and which instances are hit."""
