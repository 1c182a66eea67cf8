"""Serving: an engine that runs many requests in one loop kernel, and its requests and events.

docs/serving.md describes it. The server (`ark serve`) and `ark.LLM` stand on it.
"""
