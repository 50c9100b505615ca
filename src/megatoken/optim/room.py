"""The optimizers and learning-rate schedules (base/rooms.py)."""

ENTRIES = {
    "matrices": {"whole": "megatoken.optim.muon:open_whole_matrices"},
    "schedule": {
        "cosine": "megatoken.optim.lr_schedule:cosine",
        "linear": "megatoken.optim.lr_schedule:linear",
        "wsd": "megatoken.optim.lr_schedule:linear",
        "wsd-sqrt": "megatoken.optim.lr_schedule:square_root",
        "multi-step": "megatoken.optim.lr_schedule:multi_step",
        "constant": "megatoken.optim.lr_schedule:constant",
    },
    "optimizer": {"adamw": "megatoken.optim.optimizer:ADAMW", "muon": "megatoken.optim.muon:MUON"},
}
