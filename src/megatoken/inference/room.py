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
    "reward": {
        "exact": "megatoken.inference.rewards:reward_exact",
        "number": "megatoken.inference.rewards:reward_number",
        "gsm8k": "megatoken.inference.rewards:reward_gsm8k",
    },
    "task": {
        "hellaswag": "megatoken.inference.tasks:HELLASWAG",
        "arc_easy": "megatoken.inference.tasks:ARC_EASY",
        "arc_challenge": "megatoken.inference.tasks:ARC_CHALLENGE",
        "piqa": "megatoken.inference.tasks:PIQA",
        "winogrande": "megatoken.inference.tasks:WINOGRANDE",
        "openbookqa": "megatoken.inference.tasks:OPENBOOKQA",
        "lambada": "megatoken.inference.tasks:LAMBADA",
    },
    "check": {"tasks": "megatoken.inference.check:check_tasks"},
}
