"""The verbs, each a function that `cli/table.py` names. Nothing imports one but the table."""
