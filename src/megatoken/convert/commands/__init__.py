"""Commands of the room `convert`."""
