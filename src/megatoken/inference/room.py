"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("text",)
ENTRIES = {
    "action": {
        "tasks": "megatoken.inference.actions:open_tasks",
        "sample": "megatoken.inference.actions:open_sample",
    },
    "command": {
        "sample": "megatoken.inference.commands.sample",
        "chat": "megatoken.inference.commands.chat",
        "serve": "megatoken.inference.commands.serve",
        "eval": "megatoken.inference.commands.eval",
    },
    "section": {
        "evaluate": "megatoken.inference.settings:TasksConfig",
        "sample": "megatoken.inference.settings:SampleConfig",
    },
    "check": {"tasks": "megatoken.inference.check:check_tasks"},
}
