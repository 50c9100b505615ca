"""Saving while training goes on: each process copies what it keeps and writes it in a thread; the first one commits.

In: a live state. Out: a committed checkpoint, by the protocol in store.py. Where every process holds the whole model
the first writes it alone, into model.safetensors and optimizer.safetensors; where it is split, each writes its parts.
What processes tell each other they tell between steps, never from the thread. Absent: when to save, removing old ones.
"""

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from megatoken.checkpoint.manifest import Stored
from megatoken.checkpoint.restore import list_moments
from megatoken.checkpoint.store import discard, open_draft, publish, step_folder, write_files
from megatoken.checkpoint.tensors import MOMENTS, WEIGHTS, Held, name_file
from megatoken.errors import Exit, Fault
from megatoken.model.count import state_bytes
from megatoken.parallel.ranks import Ranks
from megatoken.train.state import State

Files = dict[str, Callable[[Path], None]]
SLACK_BYTES = 1 << 20  # beside the tensors


class Save:
    """One checkpoint on its way; all processes make one at the same step and finish it at the same later one.

    Raises Fault(STORAGE) on all of them when it cannot be begun or finished: nothing of it remains then.
    """

    def __init__(self, root: Path, state: State, *, config: Path, tokenizer: Path, meta: Mapping[str, Any]) -> None:
        """config, tokenizer: the run's resolved recipe and tokenizer folder, copied so that a checkpoint stands alone.
        meta: what else to remember. On return the state may change again."""
        began = time.perf_counter()
        self.step, self.folder, self._ranks = state.step, step_folder(root, state.step), state.ranks
        shape = state.model.shape
        self._meta = {"shape": dataclasses.asdict(shape), "scaler": state.scaler.state_dict(), **meta}
        self._entries: dict[str, Stored] = {}
        self._fault: Fault | None = None
        self.writing_seconds = 0.0
        needed = state_bytes(shape) + SLACK_BYTES
        draft = _on_first(self._ranks, lambda: _name(open_draft(root, self.step, needed)))
        self._draft = Path(draft) if draft else None  # none: it is there already
        self._thread: Thread | None = None
        if self._draft is not None:
            files: Files = dict(copy_state(state))
            if self._ranks.topology.is_first:
                files["config.yaml"] = partial(_copy, config)
                files |= {f"tokenizer/{path.name}": partial(_copy, path) for path in sorted(tokenizer.iterdir())}
            self._thread = Thread(target=self._write, args=(files, needed), name="megatoken-save")
            self._thread.start()
        self.stall_seconds = time.perf_counter() - began

    def _write(self, files: Files, needed: int) -> None:
        began = time.perf_counter()
        assert self._draft is not None
        try:
            self._entries = write_files(self._draft, files, needed)
        except Fault as fault:
            self._fault = fault
        except Exception as failure:  # told where the save is finished
            self._fault = Fault(Exit.STORAGE, f"checkpoint was not saved: {failure!r}", str(self._draft))
        self.writing_seconds = time.perf_counter() - began

    def is_written(self) -> bool:
        """Whether every process is ready, so that `finish` does not wait; all have to ask."""
        return not self._ranks.any(self._thread is not None and self._thread.is_alive())

    def finish(self) -> Path:
        """Wait for what is being written, commit it, return its folder."""
        if self._thread is None or self._draft is None:
            return self.folder
        began, draft = time.perf_counter(), self._draft
        self._thread.join()
        told = self._ranks.gather(
            {
                "fault": _spell(self._fault),
                "entries": {name: dataclasses.astuple(stored) for name, stored in self._entries.items()},
            }
        )

        def commit() -> None:
            try:
                for code, what in (one["fault"] for one in told if one["fault"]):
                    raise Fault(Exit(code), what)
                entries = {name: Stored(*stored) for one in told for name, stored in one["entries"].items()}
                publish(draft, self.step, entries, meta=self._meta)
            finally:
                discard(draft)

        _on_first(self._ranks, commit)
        self.stall_seconds += time.perf_counter() - began
        return self.folder


def save_state(root: Path, state: State, *, config: Path, tokenizer: Path, meta: Mapping[str, Any]) -> Path:
    """Commit the state as checkpoint `state.step` under `root` and wait for it; return its folder."""
    return Save(root, state, config=config, tokenizer=tokenizer, meta=meta).finish()


def copy_state(state: State) -> Files:
    """Writers of the files of this process, with copies of its tensors."""
    placement, layout = state.placement, state.layout
    if layout.is_whole and not state.ranks.topology.is_first:
        return {}
    mine = {name: kept for name, kept in placement.kept.items() if layout.is_whole or placement.is_first_copy(name)}
    moments = {name: tensor for name, tensor in list_moments(state).items() if name.rpartition("/")[0] in mine}
    if layout.is_whole:
        return {name_file(WEIGHTS): _hold(mine).write, name_file(MOMENTS): _hold(moments).write}
    writers, writer = state.ranks.topology.world_size, state.ranks.topology.rank
    parts = {name: placement.parts[name.partition("/")[0]] for name in (*mine, *moments)}
    sizes = {name: placement.sizes[name.partition("/")[0]] for name in (*mine, *moments)}
    sizes |= {name: () for name, tensor in moments.items() if not tensor.dim()}
    return {
        name_file(kind, writer, writers): dataclasses.replace(_hold(tensors), parts=parts, sizes=sizes).write
        for kind, tensors in ((WEIGHTS, mine), (MOMENTS, moments))
        if tensors
    }


def _hold(tensors: Mapping[str, Tensor]) -> Held:
    """Copies on the CPU, which the next step does not change."""
    return Held({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})


def _on_first(ranks: Ranks, call: Callable[[], str | None]) -> str | None:
    """What the first process's call returns, for all; its Fault, too."""
    said: dict[str, Any] = {}
    if ranks.topology.is_first:
        try:
            said["value"] = call()
        except Fault as fault:
            said["fault"] = _spell(fault)
    said = ranks.agree(said)
    if said.get("fault"):
        code, what = said["fault"]
        raise Fault(Exit(code), what)
    value: str | None = said["value"]
    return value


def _spell(fault: Fault | None) -> list[Any] | None:
    return None if fault is None else [int(fault.code), str(fault)]


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
