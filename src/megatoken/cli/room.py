"""What this room adds to the core (base/rooms.py)."""

ENTRIES = {
    "launcher": {"local": "megatoken.cli.ranks:train_in_processes"},
    "command": {
        "train": "megatoken.cli.train",
        "runs": "megatoken.cli.runs",
        "config": "megatoken.cli.config",
        "describe": "megatoken.cli.describe",
        "doctor": "megatoken.cli.doctor",
        "completion": "megatoken.cli.completion",
        "verify": "megatoken.cli.verify",
    },
}
