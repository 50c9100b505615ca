"""megatoken pre-trains GPT-2, GPT-3 and LLaMA models from raw text.

STAGES is the order of the house: the order in which data flows and the only direction in which
modules may import. A stage imports itself and earlier stages; tests/test_architecture.py enforces it.
"""

__version__ = "0.1.0"

STAGES = (
    "errors",  # one kind of failure, with its exit code
    "console",  # how things are shown to people
    "presets",  # model shapes by name: pure data
    "knobs",  # what a knob is and how its value is read
    "architecture",  # the knobs of the network
    "config",  # every knob, typed and frozen
    "recipe",  # YAML and overrides to a checked run, with origins
    "peaks",  # vendor data sheets: pure data
    "hardware",  # what is this machine; the only reader of the environment
    "timing",  # things measured side by side
    "device",  # what torch can do on it
    "data",  # documents -> tokenizer -> prepare -> shards -> loader
    "model",  # GPT, loss, counts
    "optim",  # parameter groups, learning-rate schedule
    "parallel",  # which process of how many; what they tell each other
    "train",  # state, step, meter, journal, guard
    "checkpoint",  # commit protocol, restore
    "evaluate",  # held-out loss; multiple-choice tasks
    "sample",  # key/value cache, decoding
    "interop",  # other programs' models and recipes
    "plot",  # curves and pictures from metrics.jsonl
    "verify",  # every hash of a folder, recomputed
    "progress",  # the bar of prepare
    "bench",  # every speed measured on this machine
    "plan",  # what a run needs, found out before it is started
    "doctor",  # what this machine lacks to train
    "writing",  # a prompt continued on the screen
    "judging",  # a model's scores and losses on the screen
    "harness",  # the same model handed to lm-evaluation-harness
    "opening",  # what happens once, before the first step
    "pretrain",  # the program: the page to read first
    "arguments",  # words into options
    "cli",  # one call per subcommand
)
