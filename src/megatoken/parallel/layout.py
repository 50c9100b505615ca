"""How a model lies on many processes: what is split, along which axes, and what of it one process then holds.

In: knobs, the number of processes, the model's size, memory. Out: a Layout. Arithmetic only, no torch.

Processes stand on three axes: `tensor` (neighbours share every layer), `shards` (they share weights, gradients or
moments and read different data), `replicas` (whole copies, which read different data, too). Kinds, by what is split
over the shards (Rajbhandari et al. 2020, ZeRO):

    none    nothing: every replica holds all
    zero1   weights and moments; a whole copy of the weights, and whole gradients, live within a step
    zero2   gradients, too, summed at every micro-batch
    zero3   weights, too: a layer's are whole only while it computes
    hybrid  as zero3 within a machine; machines are replicas
"""

from dataclasses import dataclass, replace

from megatoken.config import Machine
from megatoken.errors import Exit, Fault
from megatoken.presets import Shape

SIMPLEST_FIRST = ("none", "zero1", "zero2", "zero3")
STATE_SHARE = 0.7  # of memory that weights, gradients and moments may take; the rest is for activations
FP32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The length of each axis, and one process's place on it."""

    kind: str = "none"
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    rank: int = 0

    @property
    def readers(self) -> int:
        """How many read different data."""
        return self.replicas * self.shards

    @property
    def reader(self) -> int:
        """Which of them this is: tensor neighbours read the same."""
        return self.rank // self.tensor

    @property
    def shard(self) -> int:
        return self.reader % self.shards

    @property
    def slice(self) -> int:
        """The place on the tensor axis."""
        return self.rank % self.tensor

    @property
    def is_whole(self) -> bool:
        """Whether every process holds the whole model."""
        return self.shards == self.tensor == 1

    def __str__(self) -> str:
        parts = [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [f"{self.kind} over {self.shards}"] if self.shards > 1 else []
        parts += [f"tensor parallel over {self.tensor}"] if self.tensor > 1 else []
        return ", ".join(parts) or "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes in one process between two micro-batches of a step, without activations."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def lay_out(kind: str, tensor: int, *, rank: int = 0, world_size: int = 1, local_world_size: int = 1) -> Layout:
    """The layout of a kind on so many processes. Raises Fault(CONFIG) when they do not divide."""
    if world_size % tensor:
        what = f"a world size of {world_size} does not divide into groups of {tensor}"
        raise Fault(Exit.CONFIG, what, "machine.tensor_parallel", f"--nproc times nodes must be a multiple of {tensor}")
    readers = world_size // tensor
    shards = {"none": 1, "hybrid": max(1, local_world_size // tensor)}.get(kind, readers)
    if readers % shards:
        what = f"{world_size} processes are not whole machines of {local_world_size}"
        raise Fault(Exit.CONFIG, what, "machine.shard", "start as many on each machine, or use zero3")
    return Layout(
        kind=kind if shards > 1 else "none", replicas=readers // shards, shards=shards, tensor=tensor, rank=rank
    )


def choose_kind(wanted: str, tensor: int, parameters: int, precision: str, memory_bytes: int, **processes: int) -> str:
    """The kind that the recipe names, or the simplest whose state leaves room for activations; zero3 if none does.

    parameters: of the whole model; memory_bytes: of one process, 0 when unknown; processes: as for `lay_out`.
    """
    if wanted != "auto":
        return wanted
    for kind in SIMPLEST_FIRST:
        held = count_held(lay_out(kind, tensor, **processes), parameters, precision)
        if not memory_bytes or held.total_bytes <= STATE_SHARE * memory_bytes:
            break
    return kind


def fit_machine(machine: Machine, layout: Layout) -> Machine:
    """What is left to `auto`, narrowed to what computes on a split model.

    Weights split over the tensor axis are multiplied by torch alone; weights that FSDP gathers come in low precision
    already, and others are cast at each use.
    """
    if layout.is_whole:
        return machine
    machine = replace(machine, mixed="autocast")
    return replace(machine, linear="torch", fused="off") if layout.tensor > 1 else machine


def check_layout(layout: Layout, shape: Shape) -> None:
    """Raise Fault(CONFIG) unless the tensor axis divides what it splits: heads, MLP, vocabulary, context."""
    sizes = {
        "model.n_head": shape.n_head,
        "model.n_kv_head": shape.kv_heads,
        "width of the MLP": shape.d_ff,
        "padded vocabulary": shape.padded_vocab_size,
        "model.seq_len": shape.seq_len,
    }
    for name, size in sizes.items():
        if size % layout.tensor:
            what = f"{layout.tensor} does not divide the {name.removeprefix('model.')} of {size:,}"
            raise Fault(Exit.CONFIG, what, "machine.tensor_parallel", "choose a number that does")


def count_held(layout: Layout, parameters: int, precision: str) -> Held:
    """Bytes that one process holds, to within what does not divide: norms, biases of a layer's output, remainders.

    parameters: of the whole model, of which a tensor neighbour has its part. Weights, gradients and both moments are
    fp32; whole copies of sharded weights are in the precision of the products.
    """
    mine = parameters // layout.tensor
    part = mine // layout.shards
    copy_bytes = FP32 if precision == "fp32" else 2
    whole_weights = layout.kind in ("zero1", "zero2")
    whole_gradients = layout.kind in ("none", "zero1")
    return Held(
        parameter_bytes=FP32 * part + (copy_bytes * mine if whole_weights else 0),
        gradient_bytes=FP32 * (mine if whole_gradients else part),
        optimizer_bytes=2 * FP32 * part,
    )
