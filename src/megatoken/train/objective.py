"""What a run trains for: its loss, its data and batches, and its held-out measurements.

`Objective` pre-trains on text. A room adds another one as an entry of the kind "objective": a
subclass that overrides what differs.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from megatoken.base.config.load import ResolvedConfig
from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError
from megatoken.base.rooms import load_entry
from megatoken.base.system.torch_compat import uncompiled
from megatoken.data.dataloader import (
    Batch,
    DataLoader,
    Prefetcher,
    evaluation_windows,
    separate_documents,
    to_batch,
)
from megatoken.data.dataset import Dataset
from megatoken.data.mixture import Mixture, find_document_start
from megatoken.distributed.comm import Comm
from megatoken.distributed.parallel_dims import build_dims, check_dims
from megatoken.train.run import Run
from megatoken.train.state import CrossEntropy, Loss
from megatoken.train.val_loss import validation_loss

Poll = Callable[[], None]  # called on all ranks between parts of long work; may raise StopRequested


class BatchSource(Protocol):
    """Provides this process's share of each batch. metrics: values to log for the latest batch."""

    metrics: dict[str, float]

    def get(self, number: int) -> Batch:
        """Return batch `number`, on the device."""

    def validate(self, poll: Poll) -> tuple[dict[str, Any], str]:
        """Measure the model on held-out data; return values to log, with `loss`, and their text."""

    def close(self) -> None:
        """Stop background work. `validate` can still be called."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Pre-training: the cross-entropy of text. Fields of subclasses are options of the `Trainer`.

    kind: kind of dataset that it trains on. fills_context: whether rows fill the context, for which
    FLOPs are counted. is_chat: whether the model learns to answer messages instead of continuing
    text.
    """

    kind: ClassVar[str] = "text"
    fills_context: ClassVar[bool] = True
    is_chat: ClassVar[bool] = False

    def record_options(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Return the config with the options in it, so that resuming with others fails."""
        return resolved

    def stop_interval(self, config: Config) -> int:
        """Return the number of steps between two steps at which a run can stop and resume.

        If it is not 1, `BatchSource.get` must call `Run.check_stop` at these steps.
        """
        return 1

    def check_data(self, config: Config, dataset: Mixture) -> None:
        """Raise DataError if the objective cannot train on the datasets."""
        for component in dataset.components:
            component.dataset.require_kind(self.kind, f"objective.name={config.objective.name}")

    def open_data(
        self, config: Config, dataset: Mixture, comm: Comm
    ) -> tuple[DataLoader | None, int]:
        """Return this data-parallel rank's loader, if batches need one, and the tokens of an epoch.

        Raises DataError or ConfigError if the data does not suit the config or the ranks.
        """
        start = find_document_start(dataset) if config.data.document_mask else None
        loader = open_loader(DataLoader, config, dataset, comm, document_start=start)
        return loader, loader.n_windows * loader.seq_len

    def build_loss(self, config: Config) -> Loss:
        return CrossEntropy(config.objective.weights)

    def open_batches(self, run: Run) -> BatchSource:
        return TextBatches(run)

    def show(self, row: Mapping[str, Any]) -> list[str]:
        """Return the most important values of a step as texts."""
        return [f"loss {row['loss']:.4f}"]

    def next_command(self, config: Config, out: Path) -> str:
        """Return the arguments of `megatoken` that use the finished run."""
        run = shlex.quote(str(out))
        return f"chat {run}" if self.is_chat else f'sample {run} "your prompt"'


def load_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """Return the objective of this name. Options that are None are left out.

    Raises ConfigError if it does not have one of the options.
    """
    objective: type[Objective] = Objective if name == "pretrain" else load_entry("objective", name)
    given = {key: value for key, value in (options or {}).items() if value is not None}
    for key in given.keys() - {field.name for field in fields(objective)}:
        what = f"a {key} has no effect with objective.name={name}"
        raise ConfigError(what, "Trainer", "leave it out, or use another objective")
    return objective(**given)


def open_loader(
    loader: type[DataLoader], config: Config, dataset: Mixture, comm: Comm, **options: Any
) -> DataLoader:
    """Return this rank's loader; all ranks of a tensor-parallel group get the same batches."""
    order = config.data.order
    if order == "sequential" and len(dataset.components) > 1:
        fix = "set data.order=shuffled, or one dataset in data.path"
        raise ConfigError("a mixture must be shuffled", "data.order", fix)
    dims = build_dims("none", config.machine.tensor_parallel, comm.dist_env)
    check_dims(dims, config.model)
    return loader(
        dataset.train,
        seq_len=config.model.seq_len,
        batch_size=config.batch_seqs,
        seed=config.seed,
        dp_rank=dims.dp_rank,
        dp_size=dims.dp_size,
        ramp=config.budget.ramp,
        order=order,
        sources=[(len(each.dataset.train), each.share) for each in dataset.components],
        **options,
    )


class TextBatches(Prefetcher):
    """Batches of windows, validated by the cross-entropy of held-out windows."""

    def __init__(self, run: Run) -> None:
        assert run.data.loader is not None
        super().__init__(run.data.loader, run.device.torch_device)
        self.run = run

    def validate(self, poll: Poll) -> tuple[dict[str, Any], str]:
        """Return loss (nats), bits_per_byte and target_tokens of the held-out data, and their text.

        For a mixture, loss and bits_per_byte are means over the datasets, weighted by their shares
        of the training tokens, and target_tokens is the total. `sources` then holds the values of
        each dataset, by name.
        """
        components = [each for each in self.run.data.dataset.components if len(each.dataset.val)]
        sources = {each.name: self._measure(each.dataset, poll) for each in components}
        total_share = sum(each.share for each in components)

        def average(key: str) -> float:
            shares = ((each.share / total_share, sources[each.name]) for each in components)
            return float(sum(share * values[key] for share, values in shares))

        row = sources[components[0].name]
        if len(components) > 1:
            row = {
                "loss": average("loss"),
                "bits_per_byte": average("bits_per_byte"),
                "target_tokens": sum(values["target_tokens"] for values in sources.values()),
                "sources": sources,
            }
        text = f"validation loss {row['loss']:.4f}"
        if math.isfinite(row["bits_per_byte"]):
            text += f", {row['bits_per_byte']:.4f} bits per byte"
        text += f" over {row['target_tokens']:,} tokens"
        for name, values in row.get("sources", {}).items():
            text += f", {name} {values['loss']:.4f}"
        return row, text

    def _measure(self, dataset: Dataset, poll: Poll) -> dict[str, Any]:
        run = self.run
        state = run.state
        count, read = self.hold_out(dataset, run.config.evaluate.tokens)
        # Each forward gets the same rows for any number of ranks; all ranks run equally many.
        size = run.step_config.micro_batch
        dims = state.dims
        starts = range(dims.dp_rank * size, count + dims.dp_rank * size, dims.dp_size * size)

        def batches() -> Iterator[Batch]:
            for start in starts:
                poll()
                yield read(start, size)

        with uncompiled(state.model) as model:
            metrics = validation_loss(
                model,
                batches(),
                run.device,
                chunk=run.step_config.loss_chunk,
                comm=state.comm,
                count_bytes=dataset.byte_counter("val", run.data.dataset.vocabulary),
                dims=dims,
                output_layer=state.compute.output_layer,
            )
        return {key: metrics[key] for key in ("loss", "target_tokens", "bits_per_byte")}

    def hold_out(
        self, dataset: Dataset, limit_tokens: int
    ) -> tuple[int, Callable[[int, int], Batch]]:
        """Choose rows of the held-out split with about `limit_tokens` tokens in total.

        Returns their number, and a function that reads rows [first, first + count).
        """
        windows = evaluation_windows(
            dataset.val, seq_len=self.loader.seq_len, limit_tokens=limit_tokens
        )
        start = self.loader.document_start
        return len(windows), lambda first, count: separate_documents(
            to_batch(windows.rows(first, count)), start
        )
