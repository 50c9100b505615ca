"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert", "inference", "plan", "text")
ENTRIES = {
    "command": {
        "race": "megatoken.study.commands.race",
        "sweep": "megatoken.study.commands.sweep",
        "scaling": "megatoken.study.commands.scaling",
        "reproduce": "megatoken.study.commands.reproduce",
        "bench": "megatoken.study.commands.bench",
        "plot": "megatoken.study.commands.plot",
        "report": "megatoken.study.commands.report",
    }
}
