"""Train tiny runs in a second, and read what they wrote."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from megatoken.base.config.load import ResolvedConfig, resolve
from megatoken.base.console import Console
from megatoken.base.system.metrics_log import read_metrics
from megatoken.store.commit import list_steps, step_folder
from megatoken.train.train import Summary, Trainer

TEXT = b"to be or not to be, that is the question. "
TINY = Path(__file__).with_name("tiny.yaml")
# The same machine for other recipes.
MACHINE = (
    "machine.device=cpu machine.precision=fp32 machine.threads=1 machine.attention=flash "
    "machine.gemm_backend=torch log.plots=false log.every=1"
)


def write_shards(folder: Path, train: bytes = TEXT * 300, val: bytes = TEXT * 24) -> str:
    """Write external shards of byte ids; return the setting that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in (("train", train), ("val", val)):
        if text:
            ids = np.frombuffer(text, np.uint8).astype(np.uint16)
            np.save(folder / f"{split}_0.npy", ids)
    return f"data.path={folder}/*.npy"


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write a row of JSON a line; create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny_run(*settings: str, recipe: object = TINY) -> ResolvedConfig:
    """Return a recipe with settings, several of them separated by spaces in one string."""
    return resolve(str(recipe), " ".join(settings).split())


def train(
    out: Path, *settings: str, recipe: object = TINY, stop: int = 0, **options: Any
) -> Summary:
    """Train in this process, until a step if one is given. options: of the Trainer."""
    options.setdefault("console", Console(quiet=True))
    if stop:
        options["callbacks"] = [*options.get("callbacks", ()), stop_at(stop)]
    return Trainer(tiny_run(*settings, recipe=recipe), out, **options).fit()


def stop_at(step: int) -> Callable[[dict[str, Any]], bool]:
    """Return a callback that stops a run after a step."""
    return lambda row: row["kind"] == "train" and row["step"] == step


def read_rows(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == kind]


def read_column(out: Path, key: str, kind: str = "train") -> dict[int, Any]:
    """Return a value by step."""
    return {row["step"]: row[key] for row in read_rows(out, kind)}


def read_losses(out: Path, kind: str = "train") -> list[float]:
    return [row["loss"] for row in read_rows(out, kind)]


def read_events(out: Path, what: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(out, "event") if row["what"] == what]


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint, unverified; 0 without one."""
    return max(list_steps(out / "checkpoints"), default=0)


def read_tensors(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state of the newest checkpoint, by file and name."""
    folder = step_folder(out / "checkpoints", newest_step(out))
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def assert_equal_tensors(out: Path, expected: Path) -> None:
    """Compare the newest checkpoints of two runs bit for bit."""
    found, wanted = read_tensors(out), read_tensors(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def fingerprint(out: Path) -> dict[str, Any]:
    """Return the newest weights and moments, and the logged numbers, to compare bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in read_tensors(out).items():
        digest.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
    keys = ("kind", "step", "tokens", "loss", "grad_norm", "lr", "text", "target_tokens")
    rows = [
        {key: row[key] for key in keys if key in row}
        for kind in ("train", "val", "sample")
        for row in read_rows(out, kind)
    ]
    return {"step": newest_step(out), "tensors": digest.hexdigest(), "rows": rows}
