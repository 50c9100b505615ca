"""llm.c's C trainer, built in the user's checkout with its Makefile's flags.

Runs forward, backward and AdamW in fp32 on our initial weights and ids, in its own process. It has
no gradient clipping and decays every parameter.
"""

import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.schema import OptimConfig
from megatoken.base.errors import ConfigError, PeerError
from megatoken.convert.llmc import write_llmc
from megatoken.study.bench.workload import build_model

LOADED = re.compile("loaded")
LOG = re.compile(
    r"step \d+: train loss (\S+) \(took (\S+) ms\)"
)  # llm.c's train_gpt2.c prints it for every step
DRIVER = Path(__file__).parent / "llmc_driver.c"
RULE = "megatoken: ; $(CC) $(CFLAGS) $(INCLUDES) $(LDFLAGS) -I. {} $(LDLIBS) -o {}"


class LlmcTrainer:
    """A running llm.c process. step_seconds: time of the last step by llm.c's own clock."""

    def __init__(
        self, source: Path, config: ModelConfig, optim: OptimConfig, batch_seqs: int
    ) -> None:
        """Build and start it. source: train_gpt2.c of a checkout. Raises ConfigError if the build
        fails.
        """
        self.step_seconds = 0.0
        numbers = (optim.lr, optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        with tempfile.TemporaryDirectory(
            prefix="megatoken-"
        ) as name:  # until all of it is in memory
            program, model = build(source.parent, Path(name)), Path(name) / "model.bin"
            write_llmc(model, build_model(config), "fp32")
            arguments = [*map(str, (program, model, batch_seqs, config.seq_len, *numbers))]
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._read(LOADED)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on ids and targets (B, T) and return the mean loss in nats. Raises PeerError if
        the process ends.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(
                inputs.int().numpy().tobytes() + targets.int().numpy().tobytes()
            )
            self.process.stdin.flush()
        logged = self._read(LOG)
        self.step_seconds = float(logged[2]) / 1e3
        return float(logged[1])

    def _read(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Return the next line that matches; llm.c also prints others."""
        assert self.process.stdout is not None
        last = ""
        for line in self.process.stdout:
            last = line.decode(errors="replace").strip()
            if found := pattern.fullmatch(last):
                return found
        self.close()
        what = f"llm.c ended with code {self.process.returncode}: {last}"
        raise PeerError(what, "bench peers", "give a smaller shape or batch")

    def close(self) -> None:
        """Terminate the process."""
        self.process.terminate()
        with suppress(BrokenPipeError, ValueError):  # closed before
            self.process.communicate()

    def peak_memory_bytes(self) -> int:
        """Return the peak memory of the process, or 0 if unknown."""
        with suppress(OSError, AttributeError):
            text = Path(f"/proc/{self.process.pid}/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\s*(\d+)", text)[1])  # type: ignore[index]
        return 0


def build(checkout: Path, folder: Path) -> Path:
    """Build DRIVER by the checkout's Makefile, writing only to `folder`. Raises ConfigError."""
    program = folder / "train_gpt2"
    if not (make := shutil.which("make")) or not (checkout / "Makefile").is_file():
        raise ConfigError(
            "llm.c is built by make and its Makefile",
            str(checkout),
            "install make, give a whole checkout",
        )
    arguments = [
        make,
        "-s",
        "-C",
        str(checkout),
        f"BUILD_DIR={folder}",
        "--eval",
        RULE.format(DRIVER, program),
        "megatoken",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not program.is_file():
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [
            "make failed"
        ]
        raise ConfigError(
            f"cannot build llm.c: {lines[0].strip():.200}",
            str(checkout),
            "check that `make train_gpt2` works",
        )
    return program
