"""Where a preparation stands: `progress.json`, written whole or not at all.

In: the recipe, the cursor, what was written. Out: the same after a kill. Deliberately absent: what to do with
it (prepare.py).
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatoken.data.blocks import Cursor
from megatoken.data.disk import sync_folder
from megatoken.data.shard_writer import SplitState
from megatoken.data.shards import Shard
from megatoken.errors import Exit, Fault

PROGRESS_NAME = "progress.json"


@dataclass(slots=True)
class Position:
    """Everything up to `cursor` is in the shards and on the disk, and nothing else counts."""

    recipe: dict[str, Any]  # what decides every byte of the result
    listing: str  # digest of the inputs with their times of change
    cursor: Cursor = field(default_factory=Cursor)
    open: str = ""  # the split of the document that goes on at the cursor
    open_replaced: bool = False
    complete: bool = False  # every document is written; the validation split may still have to be cut
    done_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    train: SplitState = field(default_factory=SplitState)
    val: SplitState = field(default_factory=SplitState)

    @property
    def tokens(self) -> int:
        """Tokens that are kept when the preparation goes on from here."""
        return self.train.total_tokens + self.val.total_tokens


def save_position(folder: Path, position: Position) -> None:
    """Writes `progress.json` durably. Raises OSError as the disk does; the earlier one then stays."""
    path = folder / PROGRESS_NAME
    temporary = path.with_name(PROGRESS_NAME + ".tmp")
    content = asdict(position) | {"counts": dict(position.counts)}  # asdict garbles a Counter
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(folder)


def load_position(folder: Path) -> Position | None:
    """What `save_position` wrote, None when there is nothing. Fault(Exit.DATA) when it cannot be read."""
    path = folder / PROGRESS_NAME
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_bytes())
        row["cursor"] = Cursor(*row["cursor"])
        row["counts"] = Counter(row["counts"])
        for split in ("train", "val"):
            row[split] = _read_state(row[split])
        return Position(**row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "delete the output folder and prepare again"
        raise Fault(Exit.DATA, f"cannot read how far the preparation was: {error}", str(path), fix) from error


def _read_state(row: dict[str, Any]) -> SplitState:
    closed = [Shard(**{**shard, "blocks": tuple(shard["blocks"])}) for shard in row["closed"]]
    return SplitState(closed, int(row["tokens"]), list(row["blocks"]))
