"""Grades: what of an agent's change is kept, and what could steer the tests."""
