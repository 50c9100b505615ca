"""A model behind HTTP: one batch for many clients, OpenAI's interface, a page to talk on."""
