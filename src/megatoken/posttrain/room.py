"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert", "inference", "text")
ENTRIES: dict[str, dict[str, str]] = {}
