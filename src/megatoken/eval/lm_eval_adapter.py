"""lm-evaluation-harness on a loaded model: any task that the harness knows, without exporting the model.

Log-likelihoods come from eval/scorer.py, which computes a context once for all of its continuations. A model with a
chat template gets its prompts, and solved examples, as a conversation.
"""

import importlib.metadata
import json
import re
from argparse import Namespace
from collections import defaultdict
from typing import Any

from megatoken.console import Console
from megatoken.convert.load_pretrained import LoadedModel
from megatoken.data.chat_template import ChatTemplate, Message, find_stop_ids, template_of
from megatoken.data.tokenizer import Tokenizer
from megatoken.distributed.comm import Comm
from megatoken.errors import ConfigError, DataError
from megatoken.eval.scorer import ScoredSequence, build_tree, score_trees
from megatoken.model.gpt import GPT
from megatoken.sampling.batch import Request, decode
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import TextStream
from megatoken.system.device import Device

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:
    lm_eval, TemplateLM = None, object

NEW_TOKENS = 256  # where the task does not say, as the harness
CONTROL = "\ufdd0"  # no character of any text: before each control token of a conversation, so that content has none


class Adapter(TemplateLM):  # type: ignore[misc]
    """A model behind the harness's interface. Every rank is given all requests and returns all results."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        device: Device,
        comm: Comm,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.compute_device, self.comm = model, tokenizer, device, comm
        self.max_length = model.config.seq_len
        self.template, self.stop_ids = template, find_stop_ids(tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        return (self.tokenizer.bos_ids or [self.tokenizer.eot])[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        ids = [] if add_special_tokens is False else list(self.tokenizer.bos_ids)
        if CONTROL not in string:
            return [*ids, *self.tokenizer.encode(string).tolist()]
        special = self.tokenizer.special_ids
        tokens = "|".join(re.escape(token) for token in special)
        for number, part in enumerate(re.split(f"{CONTROL}({tokens})", string)):
            ids += [special[part]] if number % 2 else self.tokenizer.encode(part).tolist()
        return ids

    @property
    def tokenizer_name(self) -> str:
        return f"{self.tokenizer.name}-{self.tokenizer.fingerprint[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.jinja if self.template and chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text that `tok_encode` turns into the template's ids; CONTROL stands before its tokens.

        Without add_generation_prompt the last message is the beginning of the answer.
        """
        assert self.template is not None
        messages = [
            Message(row["role"], row["content"].replace(CONTROL, "")) for row in chat_history
        ]
        begun = "" if add_generation_prompt else messages.pop().content
        ids, _ = self.template.encode(messages, reply=True)
        names, text, start = {id: token for token, id in self.tokenizer.special_ids.items()}, "", 0
        ids = ids[len(self.tokenizer.bos_ids) :]
        for place, id in enumerate(ids):
            if id in names:
                text += self.tokenizer.decode(ids[start:place]) + CONTROL + names[id]
                start = place + 1
        return text + self.tokenizer.decode(ids[start:]) + begun

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """requests: (texts, context ids, continuation ids), truncated from the left as by the harness's own models."""
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        sequences = []
        for number, (_, context, continuation) in enumerate(requests):
            groups[tuple(context)].append(number)
            ids = [*context, *continuation][-(self.max_length + 1) :]
            sequences.append(ScoredSequence(ids, min(len(continuation), self.max_length)))
        trees = [build_tree([sequences[number] for number in group]) for group in groups.values()]
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        all_scores = score_trees(self.model, trees, self.compute_device, self.comm)
        for group, scores in zip(groups.values(), all_scores, strict=True):
            for number, log_p, greedy in zip(
                group, scores.log_p.tolist(), scores.greedy.tolist(), strict=True
            ):
                results[number] = log_p, greedy
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            disjoint = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(log_p for log_p, _ in self._loglikelihood_tokens(disjoint)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        rank, world_size = self.comm.dist_env.rank, self.comm.dist_env.world_size
        own = [self._generate(*request.args) for request in requests[rank::world_size]]
        gathered = self.comm.gather(own)
        return [
            gathered[number % world_size][number // world_size] for number in range(len(requests))
        ]

    def _generate(self, prompt: str, settings: dict[str, Any]) -> str:
        """The continuation up to the first stop string, without special tokens."""
        settings = normalize_gen_kwargs(settings, NEW_TOKENS)
        stops = handle_stop_sequences(
            settings.get("until"), self.tokenizer.decode(self.stop_ids[:1])
        )
        new_tokens, special = settings["max_gen_toks"], self.tokenizer.special_ids.values()
        if new_tokens >= self.max_length:
            what = f"max_gen_toks {new_tokens:,} leaves no room for a prompt in the context of {self.max_length:,}"
            raise ConfigError(
                what, "--harness", "lower it in the task, or use a model with a longer context"
            )
        request = Request(
            self.tok_encode(prompt)[new_tokens - self.max_length :] or [self.prefix_token_id],
            Sampling(
                new_tokens,
                temperature=float(settings.get("temperature", 1.0))
                if settings["do_sample"]
                else 0.0,
                top_k=int(settings.get("top_k") or 0),
                top_p=float(settings.get("top_p") or 1.0),
                stop_ids=self.stop_ids,
            ),
        )
        stream = TextStream(self.tokenizer)
        text = ""
        for token in decode(self.model, request, self.compute_device):
            if token.id not in special and token.finish_reason != "stop":
                text += stream.push(token.id)
            if any(stop in text for stop in stops if stop):
                break
        return str(postprocess_generated_text(text + stream.push(None), stops, None))


def run_harness(
    options: Namespace, loaded: LoadedModel, device: Device, comm: Comm, console: Console
) -> dict[str, Any]:
    """The harness's results for `--tasks`, any that it knows or that are in the folder `--include`.

    Raises ConfigError when it is not installed or knows no such task, DataError when a task's data cannot be read.
    """
    if lm_eval is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed", "--harness", 'pip install "megatoken[eval]"'
        )
    manager = TaskManager(include_path=str(options.include) if options.include else None)
    template = None if options.no_template else template_of(loaded.tokenizer)
    if template:
        console.print(
            f"note: prompts as conversations, by the model's chat template {template.name} (--no-template)"
        )
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        what = f"lm-evaluation-harness knows no task {unknown[0]!r}" if unknown else "no task named"
        raise ConfigError(
            what, "--tasks", "`lm_eval ls tasks` lists them; --include FOLDER adds your own"
        )
    try:
        results = lm_eval.simple_evaluate(
            model=Adapter(loaded.model, loaded.tokenizer, device, comm, template),
            tasks=names,
            num_fewshot=options.fewshot,
            limit=options.limit or None,
            task_manager=manager,
            log_samples=options.examples,
            apply_chat_template=template is not None,
            fewshot_as_multiturn=template is not None and bool(options.fewshot),
        )
    except (OSError, ValueError) as error:  # datasets and the hub
        what = f"lm-evaluation-harness failed: {type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
        raise DataError(
            what, options.tasks, "check that the task's dataset can be reached or is cached"
        ) from error
    if not options.json:
        console.print(make_table(results))
    kept = {
        key: results[key]
        for key in ("results", "groups", "versions", "n-samples", "samples")
        if key in results
    }
    applied = {"chat_template": template.name if template else None}
    return {
        "lm_eval": importlib.metadata.version("lm_eval"),
        **applied,
        **json.loads(json.dumps(kept, default=str)),
    }
