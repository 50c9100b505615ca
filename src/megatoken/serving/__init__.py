"""Serve a model over HTTP with an OpenAI-compatible API and a chat page.

Requests of concurrent clients are decoded in one batch.
"""
