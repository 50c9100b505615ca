"""Compare recorded speeds of GPUs with `megatoken plan`, with and without these records.

    python -m benchmarks.plan_error [FOLDER]

plan multiplies its formula by the median ratio of measured to predicted speed in a GPU's records.
Here each step is predicted from the other records. Needs no installation: PYTHONPATH=src.
"""

import sys
from pathlib import Path
from statistics import median

from megatoken.base.system.gpus import GPUS
from megatoken.plan.estimate import list_measured


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "records")
    print("| GPU | record | measured, tokens/s | predicted | error | with other records |")
    print("|---|---|---|---|---|---|")
    for gpu in GPUS.values():
        steps = sorted(list_measured(folder, gpu))
        for name, measured, predicted in steps:
            ratios = [rate / formula for other, rate, formula in steps if other != name]
            error = predicted / measured - 1
            learned = f"{median(ratios) * (1 + error) - 1:+.1%}" if ratios else ""
            cells = (
                gpu.name,
                name,
                f"{measured:,.0f}",
                f"{predicted:,.0f}",
                f"{error:+.1%}",
                learned,
            )
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
