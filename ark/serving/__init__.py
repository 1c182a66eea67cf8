"""Serving: an engine that runs many requests in one loop kernel, and the interface of engines.

docs/serving.md describes it. The server (`ark serve`) and `ark.LLM` use it.
"""
