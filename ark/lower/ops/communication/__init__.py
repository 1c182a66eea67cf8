"""Lowering of communication between ranks: collectives, messages and channels."""
