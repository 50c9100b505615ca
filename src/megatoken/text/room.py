"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert",)
ENTRIES = {
    "shards": {"external": "megatoken.text.external_shards:list_external"},
    "tokenizer": {"load": "megatoken.text.tokenizer:load_tokenizer"},
    "command": {
        "prepare": "megatoken.text.commands.prepare",
        "quickstart": "megatoken.text.commands.quickstart",
    },
}
