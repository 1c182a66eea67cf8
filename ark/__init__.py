"""ark compiles a whole model into one persistent kernel per GPU; this is what users import."""

__version__ = "0.1.0"
