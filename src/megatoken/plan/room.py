"""What this room adds to the core (base/rooms.py)."""

ENTRIES = {
    "summary": {"run": "megatoken.plan.summary:print_summary"},
    "peak": {"measured": "megatoken.plan.tuning.peak:with_peak"},
    "tuner": {"measured": "megatoken.plan.tuning.prepare:tune"},
    "observer": {"expectation": "megatoken.plan.expectation:open_comparison"},
    "command": {
        "plan": "megatoken.plan.commands.plan",
        "dryrun": "megatoken.plan.commands.dryrun",
        "launch": "megatoken.plan.commands.launch",
    },
}
