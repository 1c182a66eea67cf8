"""The rocm backend of ark."""
