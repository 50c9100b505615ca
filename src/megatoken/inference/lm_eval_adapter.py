"""Run any task of lm-evaluation-harness on a loaded model, without exporting the model.

Log-likelihoods come from inference/scorer.py, which runs the model once per context for all its
continuations. If the model has a chat template, prompts and few-shot examples become a
conversation.
"""

import importlib.metadata
import itertools
import json
import re
from argparse import Namespace
from collections import defaultdict
from typing import Any

from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, DataError, import_extra
from megatoken.base.system.device import Device
from megatoken.distributed.comm import Comm
from megatoken.inference.batch import Request, decode
from megatoken.inference.generate import TextStream
from megatoken.inference.sampling import Sampling
from megatoken.inference.scorer import ScoredSequence, build_tree, score_trees
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import ChatTemplate, Message, find_stop_ids, template_of
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.tokenizer import Tokenizer

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
    lm_eval = None
    TemplateLM = object

NEW_TOKENS = 256  # the harness's default
# Put before each control token in the text of a conversation; a code point that text does not use.
CONTROL = "\ufdd0"
RESULTS = ("results", "groups", "versions", "n-samples", "samples")


class Adapter(TemplateLM):  # type: ignore[misc]
    """Gives the harness access to a model. Each rank gets all requests and returns all results."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        device: Device,
        comm: Comm,
        template: ChatTemplate | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.compute_device = device
        self.comm = comm
        self.max_length = model.config.seq_len
        self.template = template
        self.stop_ids = find_stop_ids(tokenizer)

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
        """Render a conversation as text.

        `tok_encode` turns this text into the ids that the chat template gives the conversation.

        Without add_generation_prompt, the last message is the beginning of the answer, which the
        model continues.
        """
        assert self.template is not None
        messages = [
            Message(row["role"], row["content"].replace(CONTROL, "")) for row in chat_history
        ]
        prefill = "" if add_generation_prompt else messages.pop().content
        ids, _ = self.template.encode(messages, reply=True)
        names = {id: token for token, id in self.tokenizer.special_ids.items()}
        text = ""
        for is_special, group in itertools.groupby(
            ids[len(self.tokenizer.bos_ids) :], names.__contains__
        ):
            if is_special:
                text += "".join(CONTROL + names[id] for id in group)
            else:
                text += self.tokenizer.decode(list(group))
        return text + prefill

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy decoding would produce it.

        requests: each is (texts, context ids, continuation ids). Sequences that exceed the model's
        context are truncated from the left.
        """
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
            for i, number in enumerate(group):
                results[number] = float(scores.log_p[i]), bool(scores.greedy[i])
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
        rank = self.comm.dist_env.rank
        size = self.comm.dist_env.world_size
        texts = self.comm.gather([self._generate(*r.args) for r in requests[rank::size]])
        return [texts[number % size][number // size] for number in range(len(requests))]

    def _generate(self, prompt: str, settings: dict[str, Any]) -> str:
        """Generate text up to the first stop string, leaving out special tokens."""
        settings = normalize_gen_kwargs(settings, NEW_TOKENS)
        stops = handle_stop_sequences(
            settings.get("until"), self.tokenizer.decode(self.stop_ids[:1])
        )
        new_tokens = settings["max_gen_toks"]
        if new_tokens >= self.max_length:
            what = f"max_gen_toks {new_tokens:,} leaves no room in the context {self.max_length:,}"
            raise ConfigError(what, "--harness", "use a model with a longer context")
        temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
        sampling = Sampling(
            new_tokens,
            temperature=float(temperature),
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1.0),
            stop_ids=self.stop_ids,
        )
        ids = self.tok_encode(prompt)[new_tokens - self.max_length :] or [self.prefix_token_id]
        special = self.tokenizer.special_ids.values()
        stream = TextStream(self.tokenizer)
        text = ""
        for token in decode(self.model, Request(ids, sampling), self.compute_device):
            if token.id not in special and token.finish_reason != "stop":
                text += stream.push(token.id)
            if any(stop in text for stop in stops if stop):
                break
        return str(postprocess_generated_text(text + stream.push(None), stops, None))


def run_harness(
    loaded: LoadedModel, device: Device, comm: Comm, *, options: Namespace, console: Console
) -> dict[str, Any]:
    """Run the tasks of `--tasks` in the harness and return its results.

    Tasks come from the harness or from the folder `--include`. Raises ConfigError if the harness is
    not installed or does not know a task, and DataError if it cannot read a task's data.
    """
    import_extra("lm_eval", "eval")
    manager = TaskManager(include_path=str(options.include) if options.include else None)
    template = None if options.no_template else template_of(loaded.tokenizer)
    if template:
        console.print(f"note: prompts use the chat template {template.name} (--no-template)")
    names = [name.strip() for name in (options.tasks or "").split(",")]
    for name in names:
        if not manager.match_tasks([name]):
            fix = "`lm_eval ls tasks` lists them; --include FOLDER adds your own"
            raise ConfigError(f"lm-evaluation-harness has no task {name!r}", "--tasks", fix)
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
    except (OSError, ValueError) as error:  # from datasets and the hub
        what = f"lm-evaluation-harness failed: {type(error).__name__}: {error}"
        raise DataError(what, options.tasks) from error
    if not options.json:
        console.print(make_table(results))
    tables = {key: results[key] for key in RESULTS if key in results}
    return {
        "lm_eval": importlib.metadata.version("lm_eval"),
        "chat_template": template.name if template else None,
        **json.loads(json.dumps(tables, default=str)),
    }
