"""Grading away from the agent: an agent's change and the tests, in a tree that is the grader's."""
