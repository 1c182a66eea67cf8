"""Hostile input for every format that ark reads: `python -m tests.fuzz`, `nox -s fuzz`."""


class WrongResultError(Exception):
    """Raised if an accepted input gives another result than its definition."""
