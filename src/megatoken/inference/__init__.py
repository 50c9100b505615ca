"""Use a model: generate text, serve it over HTTP, evaluate it."""
