"""llm.c's C trainer as a baseline of `bench peers`: built from the user's checkout with its own Makefile's flags.

Its forward, backward and AdamW in fp32 on our initial weights and ids; it has no gradient clipping, and decays every
parameter. It runs as a process of its own that takes ids by stdin and logs as llm.c does.
"""

import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from megatoken.bench.workload import build_model
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.convert.llmc import write_llmc
from megatoken.errors import ConfigError, PeerError

LOADED = re.compile("loaded")
LOG = re.compile(
    r"step \d+: train loss (\S+) \(took (\S+) ms\)"
)  # llm.c's train_gpt2.c prints it for every step
DRIVER = Path(__file__).parent / "llmc_driver.c"
RULE = "megatoken: ; $(CC) $(CFLAGS) $(INCLUDES) $(LDFLAGS) -I. {} $(LDLIBS) -o {}"


class LlmcTrainer:
    """A live process of llm.c. step_seconds: of the last step, as llm.c has timed it."""

    def __init__(
        self, source: Path, config: ModelConfig, optim: OptimConfig, batch_seqs: int
    ) -> None:
        """source: train_gpt2.c of a checkout. Raises ConfigError where it cannot be built."""
        self.step_seconds = 0.0
        numbers = (optim.lr, optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
        with tempfile.TemporaryDirectory(
            prefix="megatoken-"
        ) as name:  # until all of it is in memory
            program, model = build(source.parent, Path(name)), Path(name) / "model.bin"
            write_llmc(model, build_model(config), "fp32")
            words = [str(word) for word in (program, model, batch_seqs, config.seq_len, *numbers)]
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._read(LOADED)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on ids and targets (B, T); return the mean loss in nats. Raises PeerError when the process ends."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(
                inputs.int().numpy().tobytes() + targets.int().numpy().tobytes()
            )
            self.process.stdin.flush()
        logged = self._read(LOG)
        self.step_seconds = float(logged[2]) / 1e3
        return float(logged[1])

    def _read(self, form: re.Pattern[str]) -> re.Match[str]:
        """The next line of the form; llm.c prints more, about the model."""
        assert self.process.stdout is not None
        last = ""
        for line in self.process.stdout:
            last = line.decode(errors="replace").strip()
            if found := form.fullmatch(last):
                return found
        self.close()
        what = f"llm.c ended with code {self.process.returncode}: {last}"
        raise PeerError(what, "bench peers", "give a smaller shape or batch")

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        with suppress(BrokenPipeError, ValueError):  # closed before
            self.process.communicate()

    def peak_memory_bytes(self) -> int:
        """The most memory that the process has held, 0 where the system does not say."""
        with suppress(OSError, AttributeError):
            text = Path(f"/proc/{self.process.pid}/status").read_text()
            return 1024 * int(re.search(r"VmHWM:\s*(\d+)", text)[1])  # type: ignore[index]
        return 0


def build(checkout: Path, folder: Path) -> Path:
    """Build DRIVER in a checkout by its Makefile's rules; nothing is written but to `folder`. Raises ConfigError."""
    program = folder / "train_gpt2"
    if not (make := shutil.which("make")) or not (checkout / "Makefile").is_file():
        raise ConfigError(
            "llm.c is built by make and its Makefile",
            str(checkout),
            "install make, give a whole checkout",
        )
    words = [
        make,
        "-s",
        "-C",
        str(checkout),
        f"BUILD_DIR={folder}",
        "--eval",
        RULE.format(DRIVER, program),
        "megatoken",
    ]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
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
