"""What only some runs over several processes need (base/rooms.py)."""

ENTRIES = {"matrices": {"sharded": "megatoken.distributed.sharded_matrices:open_matrices"}}
