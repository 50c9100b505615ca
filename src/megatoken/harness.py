"""Any model handed to lm-evaluation-harness itself, for MMLU, GSM8K and whatever else it has tasks for.

In: a loaded model. Out: the harness's own results. The live model is handed over instead of an exported folder: there
is nothing to write or to convert, any tokenizer of ours will do, and log-likelihoods come from evaluate/score.py, which
computes a context once for all of its answers. Absent: chat templates.
"""

import contextlib
import importlib.metadata
import json
from argparse import Namespace
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from megatoken.console import Console
from megatoken.device import Device
from megatoken.errors import Exit, Fault
from megatoken.evaluate.score import score_trees
from megatoken.evaluate.tree import Asked, build_tree
from megatoken.interop.weights import Loaded
from megatoken.parallel.ranks import Ranks
from megatoken.sample import generate

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:
    lm_eval, TemplateLM = None, object

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, ids of the context, ids of the continuation
MOST_NEW_TOKENS = 256  # where a task does not say


class Adapter(TemplateLM):  # type: ignore[misc]
    """Our model behind the harness's interface. Every rank is given all requests and returns all answers."""

    def __init__(self, loaded: Loaded, device: Device, ranks: Ranks) -> None:
        super().__init__()
        self.model, self.tokenizer, self.machine, self.ranks = loaded.model, loaded.tokenizer, device, ranks
        self.max_length = loaded.model.shape.seq_len

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        return (self.tokenizer.opening or [self.tokenizer.eot])[0]

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        opening = [] if add_special_tokens is False else self.tokenizer.opening
        return [*opening, *self.tokenizer.encode(string).tolist()]

    def _loglikelihood_tokens(self, requests: list[Request], **ignored: Any) -> list[tuple[float, bool]]:
        groups: dict[bytes, list[int]] = defaultdict(list)
        asked = [self._ask(context, continuation) for _, context, continuation in requests]
        for number, (_, context, _) in enumerate(requests):
            groups[np.array(context).tobytes()].append(number)
        trees = [build_tree([asked[number] for number in group]) for group in groups.values()]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for group, sums in zip(
            groups.values(), score_trees(self.model, trees, self.machine, self.ranks, greedy=True), strict=True
        ):
            for number, log_p, greedy in zip(group, sums.log_p, sums.greedy, strict=True):
                answers[number] = float(log_p), bool(greedy)
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return answers

    def _ask(self, context: list[int], continuation: list[int]) -> Asked:
        """Cut off from the left, as by the harness's own models."""
        ids = np.array([*context, *continuation], np.int64)[-(self.max_length + 1) :]
        return Asked(ids, min(len(continuation), self.max_length))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pieces = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(log_p for log_p, _ in self._loglikelihood_tokens(pieces)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        most = max((self._count_new(request.args[1]) for request in requests), default=0)
        written = torch.zeros(len(requests), most + 1, dtype=torch.int64)  # new ids, then how many
        topology = self.ranks.topology
        for number in range(topology.rank, len(requests), topology.world_size):
            ids = self._write(*requests[number].args)
            written[number, : len(ids)], written[number, -1] = torch.tensor(ids), len(ids)
        rows = self.ranks.sum(written.to(self.machine.place)).tolist()
        texts = []
        for request, row in zip(requests, rows, strict=True):
            texts.append(cut_at(self.tokenizer.decode(row[: row[-1]]), _stops(request.args[1])))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _count_new(self, settings: dict[str, Any]) -> int:
        asked = settings.get("max_gen_toks") or settings.get("max_new_tokens") or MOST_NEW_TOKENS
        return min(int(asked), self.max_length - 1)

    def _write(self, prompt: str, settings: dict[str, Any]) -> list[int]:
        """New ids, up to and with what completes a stop."""
        new, stops = self._count_new(settings), _stops(settings)
        ids = self.tok_encode(prompt)[-(self.max_length - new) :] or [self.prefix_token_id]
        sampled = settings.get("do_sample", float(settings.get("temperature", 0) or 0) > 0)
        written: list[int] = []

        def look(step: list[int | None]) -> None:
            if step[0] is not None:
                written.append(step[0])
            if any(stop in self.tokenizer.decode(written) for stop in stops):
                raise _EnoughError

        with contextlib.suppress(_EnoughError):
            generate(
                self.model,
                ids,
                tokens=new,
                temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
                top_k=int(settings.get("top_k") or 0),
                top_p=float(settings.get("top_p") or 1.0),
                stop_id=self.tokenizer.eot,
                device=self.machine,
                on_tokens=look,
            )
        return written


class _EnoughError(Exception):
    """A stop has been written."""


def _stops(settings: dict[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def cut_at(text: str, stops: list[str]) -> str:
    """The text before the first of the stops in it."""
    return text[: min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))]


def run_harness(options: Namespace, loaded: Loaded, device: Device, ranks: Ranks, console: Console) -> dict[str, Any]:
    """The harness's results for `--tasks`, any that it knows or that lie in the folder `--include`.

    Raises Fault(CONFIG) when it is not installed or knows no such task, Fault(DATA) when a task's data cannot be had.
    """
    if lm_eval is None:
        fix = 'pip install "megatoken[eval]"'
        raise Fault(Exit.CONFIG, "lm-evaluation-harness is not installed", "--harness", fix)
    manager = TaskManager(include_path=str(options.include) if options.include else None)
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    if not names or (unknown := [name for name in names if not manager.match_tasks([name])]):
        what = f"lm-evaluation-harness knows no task {unknown[0]!r}" if names else "no task named"
        raise Fault(Exit.CONFIG, what, "--tasks", "`lm_eval ls tasks` lists them; --include FOLDER adds your own")
    try:
        results = lm_eval.simple_evaluate(
            model=Adapter(loaded, device, ranks),
            tasks=names,
            num_fewshot=options.fewshot,
            limit=options.limit or None,
            task_manager=manager,
            log_samples=options.examples,
        )
    except (OSError, ValueError) as wrong:  # datasets and the hub
        what = f"lm-evaluation-harness failed: {type(wrong).__name__}: {str(wrong).strip().splitlines()[0]:.200}"
        raise Fault(
            Exit.DATA, what, options.tasks, "see that the task's dataset can be reached or is cached"
        ) from wrong
    if not options.json:
        console.say(make_table(results))
    kept = {key: results[key] for key in ("results", "groups", "versions", "n-samples", "samples") if key in results}
    version = importlib.metadata.version("lm_eval")
    return {"lm_eval": version, **json.loads(json.dumps(kept, default=str))}
