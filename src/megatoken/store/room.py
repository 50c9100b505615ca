"""What this room adds to the core, loaded when it is used (base/rooms.py)."""

NEEDS: tuple[str, ...] = ()
ENTRIES = {"address": {"dataset": "megatoken.store.datasets:fetch_dataset"}}
