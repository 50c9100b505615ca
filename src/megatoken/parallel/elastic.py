"""torchrun whose exit code is the run's: what launch scripts start on every machine.

In: torchrun's words. Out: its processes, started, watched and started again as torchrun does, and an exit code. Alone
torchrun ends with 1 whatever its processes ended with, and it takes a run that was stopped and saved itself (75) for a
failure and starts it again at once. So such a run leaves a note and ends with 0 (`megatoken train --ending`).
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from megatoken.parallel.launch import PASSED_ON
from megatoken.parallel.stopping import stopping_at_once
from megatoken.parallel.topology import separate_restarts

SAVE_SECONDS = 300  # from a signal until processes that have not ended are killed


def main(words: Sequence[str]) -> int:
    """Run torchrun; return 0, the code of the first process that failed, or the code in the note."""
    separate_restarts()
    with stopping_at_once(), tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        note = Path(folder) / "ending"
        code = run_torchrun([*words, "--ending", str(note)])
        return int(note.read_text()) if note.exists() else code


def run_torchrun(words: Sequence[str]) -> int:
    """0, or the code of the first process that failed; 128 + n for signal n."""
    own = ["--signals_to_handle", ",".join(PASSED_ON), "--shutdown-timeout", str(SAVE_SECONDS)]
    try:
        run(parse_args([*own, *words]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        print(f"error: rank {rank} ended with code {first.exitcode}: see what it said", file=sys.stderr)
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    except SignalException as stopped:
        name = signal.Signals(stopped.sigval).name
        print(f"torchrun was stopped by {name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
