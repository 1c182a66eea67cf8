"""The cuda backend of ark."""
