"""Commands of the room `inference`."""
