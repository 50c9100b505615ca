"""The optimizers (base/rooms.py)."""

ENTRIES = {
    "matrices": {"whole": "megatoken.optim.muon:open_whole_matrices"},
    "optimizer": {"adamw": "megatoken.optim.optimizer:ADAMW", "muon": "megatoken.optim.muon:MUON"},
}
