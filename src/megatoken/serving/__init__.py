"""Serve a model over HTTP: a batch for many clients, OpenAI's API, a chat page."""
