"""What this room adds to the core (base/rooms.py)."""

ENTRIES = {
    "shards": {"external": "megatoken.text.external_shards:list_external"},
    "tokenizer": {"load": "megatoken.text.tokenizer:load_tokenizer"},
    "corpus": {
        "python": "megatoken.text.sources:find_python",
        "tinyshakespeare": "megatoken.text.sources:find_shakespeare",
        "exercises": "megatoken.text.exercises:find_exercises",
        "exercises-prompts": "megatoken.text.exercises:find_exercises",
        "exercises-test": "megatoken.text.exercises:find_exercises",
    },
    "row_format": {"megatoken": "megatoken.text.chat_formats:FORMATS"},
    "command": {
        "prepare": "megatoken.text.commands.prepare",
        "quickstart": "megatoken.text.commands.quickstart",
    },
}
