"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("convert", "inference", "text")
ENTRIES = {
    "objective": {"sft": "", "dpo": "", "kto": "", "reward": "", "grpo": "", "ppo": ""},
    "section": {"objective": "megatoken.posttrain.settings:ObjectiveConfig"},
    "check": {"objective": "megatoken.posttrain.check:check_objective"},
    "recipe": {
        name: f"posttrain/recipes/{name}.yaml"
        for name in ("sft", "dpo", "kto", "reward", "grpo", "ppo")
    },
}
