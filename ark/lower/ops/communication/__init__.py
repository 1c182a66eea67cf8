"""Lowering of collectives, messages and channels."""
