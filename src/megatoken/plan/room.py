"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("study",)
ENTRIES = {
    "command": {
        "plan": "megatoken.plan.commands.plan",
        "dryrun": "megatoken.plan.commands.dryrun",
        "launch": "megatoken.plan.commands.launch",
    }
}
