"""Saving while training goes on: each rank copies its tensors and writes them in a thread; rank 0 commits.

Where every rank holds the whole model, rank 0 alone writes model.safetensors and optimizer.safetensors; where it is
sharded, each rank writes its slices. Ranks communicate between steps only, never from the thread.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from megatoken.checkpoint.commit import (
    FileWriter,
    count_needed_bytes,
    discard,
    open_draft,
    publish,
    step_folder,
    write_files,
)
from megatoken.checkpoint.load import TrainingState, describe_optimizer, list_optimizer_tensors
from megatoken.checkpoint.manifest import FileEntry, encode_model_config
from megatoken.checkpoint.tensor_files import MODEL, OPTIMIZER, tensor_file_name, write_tensors
from megatoken.errors import MegatokenError, StorageError
from megatoken.model.kernels.attention import BUILT_IN

POLL_SECONDS = 0.5


class AsyncSave:
    """A checkpoint being written. All ranks create it at the same step and finish it at the same later step.

    Raises StorageError on all ranks when it cannot be started or finished: nothing of it remains then.
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
        """config, tokenizer: the run's resolved config and tokenizer folder, copied so that a checkpoint stands alone.

        meta: more for the manifest. When this returns, the state may change again. Raises ConfigError for optimizer
        state that cannot be saved.
        """
        start = time.perf_counter()
        self.step, self.folder, self.comm = state.step, step_folder(root, state.step), state.comm
        model_config = encode_model_config(state.model.config)
        self.meta = {
            "shape": model_config,
            "scaler": state.scaler.state_dict(),
            **describe_optimizer(state.optimizer),
        }
        self.meta |= meta
        if state.model.attention_name not in BUILT_IN:  # needed to use the weights
            self.meta["attention"] = state.model.attention_name
        self._entries: dict[str, FileEntry] = {}  # of this rank's files in the manifest
        self.files: dict[str, FileEntry] = {}  # of all ranks, once it is committed
        self._error: MegatokenError | None = None
        self.writing_seconds = 0.0
        self._n_bytes = 0  # hashed and made durable
        files, local_bytes = copy_tensors(state)
        self._needed_bytes = count_needed_bytes(sum(self.comm.gather(local_bytes)))
        # None: that checkpoint exists.
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
        """Changes as long as this rank hashes or makes durable; on rank 0, as long as any rank writes."""
        total = self._n_bytes
        if self.comm.dist_env.is_main_process and self._draft is not None:
            for path in self._draft.rglob(
                "*"
            ):  # safetensors writes into a file of another name and the final size
                with suppress(OSError):
                    status = path.stat()
                    total += status.st_size + getattr(status, "st_blocks", 0)  # not on Windows
        return total

    def is_written(self) -> bool:
        """Whether every rank has written its files, so that `finish` does not wait; all ranks must call it."""
        return not self.comm.any(self._thread.is_alive())

    def finish(self, on_progress: Callable[[int], object] = lambda _: None) -> Path:
        """Wait for the files, commit the checkpoint, return its folder.

        on_progress: called on all ranks, each time with another number, as long as the files of any of them grow.
        """
        start = time.perf_counter()
        is_writing, moves, seen = True, 0, -1
        while is_writing:
            self._thread.join(POLL_SECONDS)
            before, seen = seen, self._read_progress()
            is_writing, moved = self.comm.any_of_each([self._thread.is_alive(), seen != before])
            if moved:
                on_progress(moves := moves + 1)
        reports = self.comm.gather((self._entries, self._error))

        def commit(draft: Path) -> None:
            try:
                for error in (error for _, error in reports if error):
                    raise error
                self.files = {name: entry for own, _ in reports for name, entry in own.items()}
                publish(draft, self.step, self.files, meta=self.meta)
            finally:
                discard(draft)

        if self._draft is not None:
            self.comm.run_on_rank0(partial(commit, self._draft))
        self.stall_seconds += time.perf_counter() - start
        return self.folder


def save_state(
    root: Path, state: TrainingState, *, config: Path, tokenizer: Path, meta: Mapping[str, Any]
) -> Path:
    """Commit the state as checkpoint `state.step` under `root` and wait for it; return its folder."""
    return AsyncSave(root, state, config=config, tokenizer=tokenizer, meta=meta).finish()


def copy_tensors(state: TrainingState) -> tuple[dict[str, FileWriter], int]:
    """Writers of this rank's tensor files, with copies that the next step does not change, and their bytes.

    Of the ranks that hold the same slice, the first writes it.
    """
    sharded, dist_env = state.sharded, state.comm.dist_env
    whole, is_main = sharded.dims.is_unsharded, dist_env.is_main_process
    optimizer = list_optimizer_tensors(state)  # on every rank, so that an error is raised on all
    files: dict[str, FileWriter] = {}
    local_bytes = 0
    for kind, tensors in ((MODEL, sharded.local_params), (OPTIMIZER, optimizer)):
        params = {name: name.partition("/")[0] for name in tensors}
        own = [
            name
            for name, param in params.items()
            if (is_main if whole else sharded.is_first_copy(param))
        ]
        if not own and not is_main:
            continue
        copies = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in own}
        local_bytes += sum(tensor.nbytes for tensor in copies.values())
        if whole:
            files[tensor_file_name(kind)] = partial(write_tensors, tensors=copies)
        else:
            slices = {name: sharded.slices[params[name]] for name in own}
            shapes = {
                name: sharded.full_shapes[params[name]] if copies[name].dim() else ()
                for name in own
            }
            file = tensor_file_name(kind, dist_env.rank, dist_env.world_size)
            files[file] = partial(write_tensors, tensors=copies, slices=slices, shapes=shapes)
    return files, local_bytes
