"""An HTTP server on an engine, with OpenAI's routes. `ark serve` starts it.

docs/serve.md describes it. Needs the packages of the extra `serve`.
"""
