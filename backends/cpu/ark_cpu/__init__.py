"""The cpu backend of ark."""
