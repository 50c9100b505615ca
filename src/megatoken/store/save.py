"""Save checkpoints while training continues: each rank writes copies of its tensors in a thread.

If every rank holds the full model, only rank 0 writes model.safetensors and optimizer.safetensors;
if the model is sharded, each rank writes files of its slices, and rank 0 their index. Rank 0
commits the checkpoint. The threads never communicate with other ranks.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatoken.base.config.load import IMPORTS
from megatoken.base.errors import MegatokenError, StorageError
from megatoken.base.rooms import list_own
from megatoken.base.system.environment import imported_modules
from megatoken.model.gpt import list_own_classes
from megatoken.store.commit import (
    FileWriter,
    count_needed_bytes,
    discard,
    open_draft,
    publish,
    step_folder,
    write_files,
)
from megatoken.store.load import TrainingState, describe_optimizer, list_optimizer_tensors
from megatoken.store.manifest import FileEntry, encode_model_config
from megatoken.store.tensor_files import (
    MODEL,
    OPTIMIZER,
    index_file_name,
    tensor_file_name,
    write_index,
)

POLL_SECONDS = 0.5


class AsyncSave:
    """A checkpoint that is being written in the background.

    All ranks must create it, and later call `finish`, after the same steps. If either fails,
    StorageError is raised on all ranks and no files are left.
    """

    def __init__(
        self,
        root: Path,
        state: TrainingState,
        *,
        config: Path,
        tokenizer: Path,
        meta: Mapping[str, Any],
    ) -> None:
        """Copy the state and start writing the copy; `state` may change afterwards.

        Raises ConfigError for optimizer state that cannot be saved.

        config, tokenizer: a file and a folder to include, so that the checkpoint is self-contained.
        meta: entries to add to the manifest.
        """
        start = time.perf_counter()
        self.step = state.step
        self.folder = step_folder(root, state.step)
        self.comm = state.comm
        self.meta = {
            "shape": encode_model_config(state.model.config),
            "scaler": state.scaler.state_dict(),
            **describe_optimizer(state.optimizer),
            **meta,
        }
        # Needed to use the weights:
        if modules := imported_modules():
            self.meta[IMPORTS] = modules
        if state.model.attention_name in list_own("attention"):
            self.meta["attention"] = state.model.attention_name
        if classes := list_own_classes(state.model):
            self.meta["classes"] = classes
        self.files: dict[str, FileEntry] = {}  # files of all ranks, once committed
        self._entries: dict[str, FileEntry] = {}  # files of this rank
        self._error: MegatokenError | None = None
        self.writing_seconds = 0.0
        self._n_bytes = 0  # hashed and made durable
        files, local_bytes = copy_tensors(state)
        self._needed_bytes = count_needed_bytes(sum(self.comm.gather(local_bytes)))
        # None if the checkpoint already exists.
        self._draft = self.comm.run_on_rank0(
            lambda: open_draft(root, self.step, self._needed_bytes)
        )
        self._thread = Thread(
            target=self._write, args=(files, config, tokenizer), name="megatoken-save"
        )
        self._thread.start()
        self.stall_seconds = time.perf_counter() - start

    def _write(self, files: dict[str, FileWriter], config: Path, tokenizer: Path) -> None:
        start = time.perf_counter()
        try:
            if self.comm.dist_env.is_main_process:
                files["config.yaml"] = partial(shutil.copyfile, config)
                for path in sorted(tokenizer.iterdir()):
                    files[f"tokenizer/{path.name}"] = partial(shutil.copyfile, path)
            if self._draft is not None:
                self._entries = write_files(
                    self._draft, self.step, files, self._needed_bytes, self._count
                )
        except MegatokenError as error:
            self._error = error
        except Exception as error:  # raised by `finish`
            self._error = StorageError(f"checkpoint was not saved: {type(error).__name__}: {error}")
        self.writing_seconds = time.perf_counter() - start

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes

    def _read_progress(self) -> int:
        """Return a number that changes as long as this rank makes progress in writing."""
        total = self._n_bytes
        if self._draft is not None:
            with suppress(OSError):
                for path in writing_folder(self._draft, self.comm.dist_env.rank).iterdir():
                    total += path.stat().st_blocks
        return total

    def is_written(self) -> bool:
        """Return whether every rank has written its files. All ranks must call it."""
        return not self.comm.any(self._thread.is_alive())

    def finish(self, on_progress: Callable[[int], object] = lambda _: None) -> Path:
        """Wait until all ranks have written their files, commit them, and return the folder.

        on_progress: called on all ranks with an increasing number while any rank makes progress.
        """
        start = time.perf_counter()
        is_writing = True
        n_changes = 0
        progress = -1
        while is_writing:
            self._thread.join(POLL_SECONDS)
            previous = progress
            progress = self._read_progress()
            flags = [self._thread.is_alive(), progress != previous]
            is_writing, has_changed = self.comm.any_of_each(flags)
            if has_changed:
                n_changes += 1
                on_progress(n_changes)
        reports = self.comm.gather((self._entries, self._error))
        if self._draft is not None:
            self.comm.run_on_rank0(partial(self._commit, self._draft, reports))
        self.stall_seconds += time.perf_counter() - start
        return self.folder

    def _commit(
        self, draft: Path, reports: list[tuple[dict[str, FileEntry], MegatokenError | None]]
    ) -> None:
        try:
            for entries, error in reports:
                if error:
                    raise error
                self.files |= entries
            publish(draft, self.step, self.files, meta=self.meta)
        finally:
            discard(draft)


def copy_tensors(state: TrainingState) -> tuple[dict[str, FileWriter], int]:
    """Copy the tensors that this rank has to write, and return writers of its files by name.

    Also returns the number of bytes. A slice that several ranks hold is written by the first.
    """
    sharded = state.sharded
    dist_env = state.comm.dist_env
    optimizer = list_optimizer_tensors(state)  # on every rank: an error is raised on all
    files: dict[str, FileWriter] = {}
    n_bytes = 0
    for kind, tensors in ((MODEL, sharded.local_params), (OPTIMIZER, optimizer)):
        param_of = {name: name.partition("/")[0] for name in tensors}
        names = [name for name in tensors if sharded.is_first_copy(param_of[name])]
        if not names and not dist_env.is_main_process:
            continue
        copies = {name: copy_to_cpu(tensors[name].detach()) for name in names}
        n_bytes += sum(tensor.nbytes for tensor in copies.values())
        file = tensor_file_name(kind)
        if not sharded.dims.is_unsharded:
            file = tensor_file_name(kind, dist_env.rank, dist_env.world_size)
            if dist_env.is_main_process:
                files[index_file_name(kind)] = partial(
                    write_index,
                    name=kind,
                    tensors=copies,
                    sharded=sharded,
                    model_config=state.model.config,
                )
        files[file] = partial(write_tensors, tensors=copies, rank=dist_env.rank)
    device = next(state.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return files, n_bytes


def writing_folder(draft: Path, rank: int) -> Path:
    """Return where a rank writes tensors: safetensors chooses the name of an unfinished file."""
    return draft / f".{rank}"


def write_tensors(path: Path, tensors: dict[str, Tensor], rank: int) -> None:
    """Write a file of a draft, which appears under its name when it is complete."""
    folder = writing_folder(path.parent, rank)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / path.name)
    (folder / path.name).replace(path)
    discard(folder)


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in CPU memory; a copy from CUDA is complete after a synchronize.

    Torch keeps the pinned memory for the next save. Where there is too little, the copy is
    pageable, which is slower.
    """
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    except RuntimeError:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)
