"""The optimizers (base/rooms.py)."""

NEEDS: tuple[str, ...] = ()
ENTRIES = {
    "optimizer": {"adamw": "megatoken.optim.optimizer:ADAMW", "muon": "megatoken.optim.muon:MUON"}
}
