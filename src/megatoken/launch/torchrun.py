"""torchrun with the run's exit code: launch scripts start `python -m megatoken.launch.torchrun` on every machine.

torchrun alone ends with 1 for any failure and treats a stopped, saved run (75) as one. So a stopped run writes its code
to a marker file and ends with 0 (`megatoken train --ending`).
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
from megatoken.launch.local import FORWARDED, not_ignored, stop_at_once

SAVE_SECONDS = 300  # from a signal until processes that have not ended are killed


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; return 0, the code in the marker file, that of the first process that failed, or 128 + a signal."""
    prepare_torchrun()
    options = ["--signals_to_handle", ",".join(not_ignored(FORWARDED)), "--shutdown-timeout", str(SAVE_SECONDS)]
    with stop_at_once(), tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        marker, code = Path(folder) / "ending", 0
        try:
            run(parse_args([*options, *arguments, "--ending", str(marker)]))  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"error: rank {rank} ended with code {failure.exitcode}: see its messages", file=sys.stderr)
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        except SignalException as error:
            print(f"torchrun was stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            code = 128 + error.sigval
        return int(marker.read_text()) if marker.exists() else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
