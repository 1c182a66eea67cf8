"""Serving: an engine that runs many requests in one loop kernel, and its interface.

docs/serving.md describes it. The server (`ark serve`) and `ark.LLM` use it.
"""
