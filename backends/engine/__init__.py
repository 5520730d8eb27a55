"""The built-in engine: Hugging Face model definitions, our own scheduler, block pool and prefix cache.

It runs in a process of its own (`python -m backends.engine`) and speaks the OpenAI dialect, so the gateway talks to
it as to any other endpoint.
"""
