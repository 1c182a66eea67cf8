"""An HTTP server for an engine (ark.serving), with the routes of OpenAI's interface. `ark serve`
starts it.

docs/serve.md describes it. Needs the packages of the extra `serve`.
"""
