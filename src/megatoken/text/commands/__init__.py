"""Commands of the room `text`."""
