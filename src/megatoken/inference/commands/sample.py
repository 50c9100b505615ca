"""`megatoken sample MODEL PROMPT...`: continue prompts with a model."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from megatoken.base.console import Console, spell_controls
from megatoken.cli import Data

HELP = "generate text from a trained model"
EXAMPLE = 'megatoken sample runs/mine "Once upon a time" --tokens 100'


def run(options: Namespace, console: Console) -> Data:
    from megatoken.base.system.device import memory_errors

    with memory_errors("sample", "use --precision bf16 or --device cpu, or lower --n and --tokens"):
        return sample(options, [read_prompt(prompt) for prompt in options.prompts], console)


def read_prompt(prompt: str) -> str:
    """Return the prompt, or what stdin holds if the prompt is `-`."""
    if prompt != "-":
        return prompt.encode(errors="surrogateescape").decode(errors="replace")
    if sys.stdin.isatty():
        print("type the prompt, then Ctrl-D on a new line:", file=sys.stderr)
    return sys.stdin.buffer.read().decode(errors="replace")


def sample(options: Namespace, prompts: Sequence[str], console: Console) -> Data:
    """Generate text and print it. Without --json, a single sequence is printed as it grows.

    For a single prompt, the data is its ids and texts. For several, it is {"samples": [...]}.
    """
    from megatoken.inference.generate import TextStream, describe_window, generate_ids
    from megatoken.inference.open_model import open_model
    from megatoken.inference.sampling import Sampling
    from megatoken.text.chat_template import find_stop_ids

    sampling = Sampling(
        options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    messages = Console(to_stderr=True)
    loaded, device = open_model(options, messages.warn, int8=options.int8)
    tokenizer = loaded.tokenizer
    sampling = replace(sampling, stop_ids=find_stop_ids(tokenizer))
    is_streamed = options.n == len(prompts) == 1 and not options.json
    stream = TextStream(tokenizer, tokenizer.encode(prompts[0]).tolist())
    title = f"{loaded.source}: sample"
    if is_streamed:
        if console.is_live:
            console.rule(title)
        write(prompts[0], console)
    samples, texts = [], []
    for prompt in prompts:
        prompt_ids = tokenizer.encode(prompt).tolist()
        start_ids = tokenizer.start_ids(prompt_ids)
        note = describe_window(loaded.model.config, len(start_ids), options.tokens)
        if note:
            messages.print(f"note: {note}")
        ids = generate_ids(
            loaded.model,
            start_ids,
            sampling,
            num_samples=options.n,
            device=device,
            on_token=(lambda token: write(stream.push(token.id), console)) if is_streamed else None,
        )
        text = [tokenizer.decode_after(prompt_ids, sequence) for sequence in ids]
        texts += [prompt + continuation for continuation in text]
        samples.append({"prompt_ids": prompt_ids, "ids": ids, "text": text, "model": loaded.source})
    if is_streamed:
        write(stream.push(None) + "\n", console)
        if console.is_live:
            console.rule()
    elif console.is_live and not options.json:
        console.fence(title, texts)
    elif not options.json:
        print(f"\n{'-' * 40}\n".join(texts))
    return samples[0] if len(samples) == 1 else {"samples": samples}


def write(text: str, console: Console) -> None:
    """Write generated text to stdout; on a terminal, escape control characters."""
    sys.stdout.write(spell_controls(text) if console.is_live else text)
    sys.stdout.flush()
