"""Commands of the room `study`."""
