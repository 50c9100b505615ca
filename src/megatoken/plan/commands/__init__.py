"""Commands of the room `plan`."""
