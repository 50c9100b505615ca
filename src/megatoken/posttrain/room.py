"""What this room adds to the core (base/rooms.py)."""

NEEDS = ("inference", "text")
ENTRIES = {
    "objective": {
        "sft": "megatoken.posttrain.objectives:Sft",
        "dpo": "megatoken.posttrain.objectives:Dpo",
        "kto": "megatoken.posttrain.objectives:Kto",
        "reward": "megatoken.posttrain.objectives:RewardModel",
        "grpo": "megatoken.posttrain.objectives:Policy",
        "ppo": "megatoken.posttrain.objectives:Policy",
    },
    "option": {"reward": "megatoken.posttrain.settings:REWARD"},
    "section": {"objective": "megatoken.posttrain.settings:ObjectiveConfig"},
    "check": {"objective": "megatoken.posttrain.check:check_objective"},
    "recipe": {
        "sft": "posttrain/recipes/sft.yaml",
        "dpo": "posttrain/recipes/dpo.yaml",
        "kto": "posttrain/recipes/kto.yaml",
        "reward": "posttrain/recipes/reward.yaml",
        "grpo": "posttrain/recipes/grpo.yaml",
        "ppo": "posttrain/recipes/ppo.yaml",
    },
    "new_tokens": {"rows": "megatoken.posttrain.new_tokens:add_tokens"},
    "extension": {
        "lora_rank": "megatoken.posttrain.lora",
        "value_head": "megatoken.posttrain.value_head",
    },
    "extension_size": {
        "lora_rank": "megatoken.posttrain.extension_sizes:count_lora",
        "value_head": "megatoken.posttrain.extension_sizes:count_value_head",
    },
}
