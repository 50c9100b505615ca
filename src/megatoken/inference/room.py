"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert", "posttrain", "study", "text")
ENTRIES = {
    "command": {
        "sample": "megatoken.inference.commands.sample",
        "chat": "megatoken.inference.commands.chat",
        "serve": "megatoken.inference.commands.serve",
        "eval": "megatoken.inference.commands.eval",
    }
}
