"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert",)
ENTRIES = {
    "command": {
        "prepare": "megatoken.text.commands.prepare",
        "quickstart": "megatoken.text.commands.quickstart",
    }
}
