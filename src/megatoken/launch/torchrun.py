"""torchrun with the run's exit code: launch scripts start `python -m megatoken.launch.torchrun` on every machine.

It starts one process on each, `megatoken train --nproc N`, which starts and watches the ranks (local.py); all of these
start again when one has lost a rank. torchrun alone ends with 1 for any failure and treats a stopped, saved run (75) as
one. So a stopped run writes its code to a marker file and ends with 0 (`megatoken train --ending`).
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
    """Run torchrun; return 0, the code in the marker file, that of the process that failed, or 128 + a signal."""
    prepare_torchrun()
    script = list(arguments).index("-m") + 2
    options = [
        "--signals_to_handle",
        ",".join(not_ignored(FORWARDED)),
        "--shutdown-timeout",
        str(SAVE_SECONDS),
    ]
    with stop_at_once(), tempfile.TemporaryDirectory(prefix="megatoken-") as folder:
        marker, code = Path(folder) / "ending", 0
        try:
            parsed = parse_args([*options, *arguments[:script]])  # type: ignore[no-untyped-call]
            # Not parsed: torchrun would take --nproc for an abbreviation of its own option.
            parsed.training_script_args = [*arguments[script:], "--ending", str(marker)]
            run(parsed)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            if code < 0:  # others have said why they failed
                print(
                    f"error: the launcher was killed by {signal.Signals(-code).name}",
                    file=sys.stderr,
                )
                code = 128 - code
        except SignalException as error:
            print(f"torchrun was stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            code = 128 + error.sigval
        return int(marker.read_text()) if marker.exists() else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
