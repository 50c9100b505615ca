"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("text",)
ENTRIES = {
    "weights": {
        "nanochat": "megatoken.convert.nanochat",
        "nanogpt": "megatoken.convert.nanogpt",
        "llmc": "megatoken.convert.llmc",
        "hf": "megatoken.convert.hf.pretrained",  # last, as it takes any name
    },
    "translator": {
        "llmc": "megatoken.convert.recipes.llmc",
        "nanogpt": "megatoken.convert.recipes.nanogpt",
        "composer": "megatoken.convert.recipes.composer",
    },
    "command": {
        "export": "megatoken.convert.commands.export",
        "consolidate": "megatoken.convert.commands.consolidate",
    },
}
