"""The HTTP server: OpenAI's and Anthropic's conventions over engines. Translation only; every decision is an engine's.

`run.serve` is what `polytoken serve` calls; `app.make_app` gives the ASGI application alone, for tests and other hosts.
Needs the extra `server`.
"""
