"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("study",)
ENTRIES = {
    "tuner": {"measured": "megatoken.plan.tuning.prepare:tune"},
    "observer": {"expectation": "megatoken.plan.expectation:open_comparison"},
    "command": {
        "plan": "megatoken.plan.commands.plan",
        "dryrun": "megatoken.plan.commands.dryrun",
        "launch": "megatoken.plan.commands.launch",
    },
}
