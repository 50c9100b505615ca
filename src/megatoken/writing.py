"""`megatoken sample`: a prompt and a model by name, the continuation shown as it is written."""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatoken.config import Machine
from megatoken.console import Console
from megatoken.device import open_device
from megatoken.interop.weights import load_weights
from megatoken.model.decode import turn_weights
from megatoken.sample import TextStream, generate

DEFAULT_TOKENS = 128


def write_text(options: Namespace, prompt: str) -> dict[str, Any]:
    """Continue `prompt` with the model, printing the text as it comes unless `--json` keeps stdout for its line.

    Returns prompt_ids, ids (a list per sequence, new tokens only) and text (a string per sequence, without the
    prompt). Raises Fault(CONFIG) for numbers out of range or a prompt longer than the context.
    """
    console = Console(to_stderr=True)
    loaded = load_weights(options.model, console.warn)
    device = open_device(Machine(device=options.device, precision=options.precision))
    model, tokenizer = loaded.model.to(device.place), loaded.tokenizer
    if device.place.type == "cpu" and device.precision == "fp32":
        turn_weights(model)
    prompt_ids = tokenizer.encode(prompt).tolist()
    room = model.shape.seq_len - max(len(prompt_ids), 1)
    tokens = min(DEFAULT_TOKENS, max(room, 1)) if options.tokens is None else options.tokens
    live = options.n == 1 and not options.json
    stream = TextStream(tokenizer)
    drawn = generate(
        model,
        prompt_ids or [tokenizer.eot],
        tokens=tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        n=options.n,
        stop_id=tokenizer.eot,
        device=device,
        on_tokens=_printer(prompt, stream) if live else None,
    )
    texts = [tokenizer.decode(ids) for ids in drawn]
    if live:
        print(stream.finish(), flush=True)
    elif not options.json:
        print(("\n" + "-" * 40 + "\n").join(prompt + text for text in texts))
    return {"prompt_ids": prompt_ids, "ids": drawn, "text": texts, "model": loaded.source}


def _printer(prompt: str, stream: TextStream) -> Callable[[list[int | None]], None]:
    """A callback that prints the prompt before the first piece of text, and each piece as soon as it is whole."""
    unsaid = [prompt]

    def show(ids: list[int | None]) -> None:
        sys.stdout.write(unsaid.pop() if unsaid else "")
        if ids[0] is not None:
            sys.stdout.write(stream.push(ids[0]))
        sys.stdout.flush()

    return show
