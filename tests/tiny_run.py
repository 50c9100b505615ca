"""Shards of a repetitive text, and readers of the runs that train on it in a second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.system.metrics_log import read_metrics

TEXT = b"to be or not to be, that is the question. "


def write_shards(folder: Path, train: bytes = TEXT * 300, val: bytes = b"") -> str:
    """Write external shards of byte ids; return their address for `data.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in (("train", train), ("val", val)):
        if text:
            ids = np.frombuffer(text, np.uint8).astype(np.uint16)
            np.save(folder / f"{split}_0.npy", ids)
    return f"{folder}/*.npy"


def write_recipe(folder: Path, recipe: str, **texts: bytes) -> Path:
    """Write a recipe whose word DATA stands for shards beside it."""
    path = folder / "tiny.yaml"
    path.write_text(recipe.replace("DATA", write_shards(folder, **texts)))
    return path


def read_rows(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == kind]


def read_losses(out: Path, kind: str = "train") -> list[float]:
    return [row["loss"] for row in read_rows(out, kind)]


def read_events(out: Path, what: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(out, "event") if row["what"] == what]


def read_tensors(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state of the newest checkpoint."""
    checkpoints = out / "checkpoints"
    folder = step_folder(checkpoints, list_steps(checkpoints)[-1])
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_equal_tensors(out: Path, expected: Path) -> None:
    """Compare the newest checkpoints of two runs bit for bit."""
    found, wanted = read_tensors(out), read_tensors(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def stop_at(step: int) -> Callable[[dict[str, Any]], bool]:
    """Return a callback that stops a run after a step."""
    return lambda row: row["kind"] == "train" and row["step"] == step
