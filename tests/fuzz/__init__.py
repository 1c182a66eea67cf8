"""Hostile input for everything that ark reads: `python -m tests.fuzz`, `nox -s fuzz`."""


class WrongResult(Exception):
    """An accepted input that gives something else than its definition."""
