"""What this room adds to the rest of the core, loaded when it is used (base/rooms.py)."""

ENTRIES = {
    "address": {
        "dataset": "megatoken.store.stream:open_dataset",
        "s3_ranges": "megatoken.store.s3_ranges:open_ranges",
        "model": "megatoken.store.mirror:fetch_model",
    },
    "fetch": {"mirror": "megatoken.store.live_mirror:fetch_from_mirror"},
    "observer": {"mirror": "megatoken.store.live_mirror:open_mirror"},
}
