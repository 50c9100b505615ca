"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("posttrain", "text")
ENTRIES = {
    "command": {
        "export": "megatoken.convert.commands.export",
        "consolidate": "megatoken.convert.commands.consolidate",
    }
}
