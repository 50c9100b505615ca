"""Profile some steps of a run: `train --profile 100:110`, or `log.profile`.

Rank 0 writes to RUN/profile: a trace of the steps after FIRST until LAST (open it in Perfetto),
with all allocations; on CUDA, a snapshot of the memory as well (pytorch.org/memory_viz); and the
table of `bench parts`, with the profiler's overhead in it. Training computes the same bits.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch.profiler import profile

from megatoken.base.config.fields import Duration
from megatoken.base.config.schema import Config
from megatoken.base.errors import StorageError
from megatoken.base.system.atomic_write import storage_errors
from megatoken.base.system.timing import Timing
from megatoken.base.system.torch_compat import record_cuda_memory, write_cuda_memory
from megatoken.study.bench.parts import (
    list_events,
    profile_kernels,
    show_parts,
    sum_groups,
    summarize,
    write_trace,
)
from megatoken.study.settings import ReportConfig
from megatoken.train.actions import Action
from megatoken.train.objective import Poll
from megatoken.train.run import Run

FOLDER = "profile"


def open_profile(config: Config, data: object, context: object) -> Action | None:
    """Return the action of log.profile, if it is set."""
    text = config.section(ReportConfig).profile
    if not text:
        return None
    first, last = map(int, text.split(":"))
    return AtSteps(Duration(0), Profile(first), steps=(first, last))


@dataclass
class AtSteps(Action):
    """An action that is called at given steps, and at the end."""

    steps: tuple[int, ...] = ()

    def is_due(self, run: Run) -> bool:
        return run.state.step in self.steps


@dataclass
class Profile:
    """Profiles the steps after `first`; called on all ranks, works on rank 0."""

    first: int
    stack: ExitStack = field(default_factory=ExitStack)
    profiler: profile | None = None

    def __call__(self, run: Run, poll: Poll) -> None:
        """Start at the first step; at the next call, write what was found."""
        if not run.is_main:
            return
        if self.profiler is not None:
            self.finish(run, self.profiler)
            self.profiler = None
        elif run.state.step == self.first:
            if run.device.type == "cuda":
                record_cuda_memory()
            context = profile_kernels(run.device, memory=True)
            self.profiler = self.stack.enter_context(context)

    def finish(self, run: Run, profiler: profile) -> None:
        run.device.synchronize()
        self.stack.close()
        folder = run.out / FOLDER
        name = f"{self.first}-{run.state.step}"
        try:
            with storage_errors(folder, what="cannot write profile"):
                folder.mkdir(exist_ok=True)
                write_trace(profiler, folder / f"trace-{name}.json")
                if run.device.type == "cuda":
                    write_cuda_memory(folder / f"memory-{name}.pickle")
                table = self.tabulate(run, profiler)
                (folder / f"parts-{name}.json").write_text(json.dumps(table, indent=1))
        except StorageError as error:
            run.console.warn(str(error))
            return
        show_parts(table, run.device, run.console)
        run.console.print(f"profile of steps {self.first + 1} to {run.state.step}: {folder}")

    def tabulate(self, run: Run, profiler: profile) -> dict[str, Any]:
        """Return the parts of a mean step, as `bench parts` records them."""
        steps = run.state.step - self.first
        events = list_events(profiler, run.device)
        groups = sum_groups(events, on_cuda=run.device.type == "cuda")
        seconds = 1e-6 * (
            max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        )
        mean = {name: total / steps for name, total in groups.items()}
        timing = Timing((seconds / steps,))
        tokens = run.step_config.batch_tokens
        return summarize(run.config.model, tokens, timing, [mean], events, run.device)
