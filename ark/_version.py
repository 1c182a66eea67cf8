"""The version of ark: read by the build, by the cache of compiled programs and by `ark info`."""

__version__ = "0.1.0"
