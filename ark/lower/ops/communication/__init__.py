"""How collectives, messages and channels become groups of tasks."""
