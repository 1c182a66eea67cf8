<<<<<<< HEAD
"""Serving: an engine that runs many requests in one loop kernel, and its requests and events.
=======
"""Serving: an engine that runs many requests in one loop kernel, and its types.
>>>>>>> a0f0207b (Add ark serve)

docs/serving.md describes it. The server (`ark serve`) and `ark.LLM` stand on it.
"""
