"""Run torchrun and exit with the run's exit code; launch scripts start this module.

On each machine, torchrun starts a single `megatoken train --nproc N`. This process starts and
watches the ranks (distributed/local_launch.py). When one machine loses a rank, all machines
restart. torchrun exits with 1 after any failure, and would count a run that was stopped and saved
(75) as a failure. So a stopped run writes its code to a marker file and exits with 0 (`megatoken
train --ending`).
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from megatoken.distributed.env import prepare_torchrun
from megatoken.distributed.signals import FORWARDED, not_ignored, stop_at_once

SAVE_SECONDS = 300  # after a signal, until processes that still run are killed


def main(arguments: Sequence[str]) -> int:
    """Run torchrun and return the exit code of the run.

    If a stopped run wrote its code to the marker file, that code is returned. If all processes
    succeed, it is 0. Otherwise it is the exit code of the first process that failed. If a signal
    ended that process or torchrun, it is 128 + the signal's number.
    """
    prepare_torchrun()
    script = list(arguments).index("-m") + 2
    options = ["--signals_to_handle", ",".join(not_ignored(FORWARDED))]
    options += ["--shutdown-timeout", str(SAVE_SECONDS)]
    with stop_at_once(), tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        marker = Path(folder) / "ending"
        code = 0
        try:
            parsed = parse_args([*options, *arguments[:script]])  # type: ignore[no-untyped-call]
            # Not parsed: torchrun would read --nproc as an abbreviation of its own option.
            parsed.training_script_args = [*arguments[script:], "--ending", str(marker)]
            run(parsed)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            if code < 0:  # other failures were reported by the processes
                name = signal.Signals(-code).name
                print(f"error: the launcher was killed by {name}", file=sys.stderr)
                code = 128 - code
        except SignalException as error:
            print(f"torchrun was stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            code = 128 + error.sigval
        return int(marker.read_text()) if marker.exists() else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
