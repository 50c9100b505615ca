"""`megatoken sample MODEL PROMPT`: continue a prompt with a model."""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from megatoken.cli import Result
from megatoken.cli.arguments import add_device_arguments, add_sampling_arguments
from megatoken.config.schema import MachineConfig
from megatoken.console import Console, spell_controls
from megatoken.errors import ExitCode

HELP = "generate text from a trained model"
EXAMPLE = 'megatoken sample runs/mine "Once upon a time" --tokens 100'


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    doc = "run folder or its save.mirror, Hugging Face folder or hub name, llm.c .bin, nanoGPT .pt"
    arg("model", metavar="MODEL", help=doc)
    arg("prompt", metavar="PROMPT", nargs="?", default="-", help="default -: stdin")
    add_sampling_arguments(parser, 128)
    arg("-n", "--n", type=int, default=1, help="sequences (default 1)")
    arg("--int8", action="store_true", help="8-bit weights: faster on a CPU")
    add_device_arguments(parser)


def run(options: Namespace, console: Console) -> Result:
    from megatoken.system.device import memory_errors

    with memory_errors("sample", "use --precision bf16 or --device cpu, or lower --n and --tokens"):
        return sample(options, read_prompt(options.prompt), console)


def read_prompt(prompt: str) -> str:
    """Return the prompt, or what stdin holds if the prompt is `-`."""
    if prompt != "-":
        return prompt.encode(errors="surrogateescape").decode(errors="replace")
    if sys.stdin.isatty():
        print("type the prompt, then Ctrl-D on a new line:", file=sys.stderr)
    return sys.stdin.buffer.read().decode(errors="replace")


def sample(options: Namespace, prompt: str, console: Console) -> Result:
    """Generate text and print it. Without --json, a single sequence is printed as it grows."""
    from megatoken.convert.load_pretrained import load_pretrained
    from megatoken.data.chat_template import find_stop_ids
    from megatoken.sampling.choose import Sampling
    from megatoken.sampling.generate import (
        TextStream,
        describe_window,
        generate_ids,
        prepare_decoding,
    )
    from megatoken.system.device import open_device

    sampling = Sampling(
        options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    messages = Console(to_stderr=True)
    loaded = load_pretrained(options.model, messages.warn)
    device = open_device(MachineConfig(device=options.device, precision=options.precision))
    tokenizer = loaded.tokenizer
    model = loaded.model.to(device.torch_device)
    prepare_decoding(model, device, int8=options.int8)
    prompt_ids = tokenizer.encode(prompt).tolist()
    start_ids = tokenizer.start_ids(prompt_ids)
    note = describe_window(model.config, len(start_ids), options.tokens)
    if note:
        messages.print(f"note: {note}")
    is_streamed = options.n == 1 and not options.json
    stream = TextStream(tokenizer, prompt_ids)
    title = f"{loaded.source}: sample"
    if is_streamed:
        if console.is_live:
            console.rule(title)
        write(prompt, console)
    sequences = generate_ids(
        model,
        start_ids,
        replace(sampling, stop_ids=find_stop_ids(tokenizer)),
        num_samples=options.n,
        device=device,
        on_token=(lambda token: write(stream.push(token.id), console)) if is_streamed else None,
    )
    texts = [tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    if is_streamed:
        write(stream.push(None) + "\n", console)
        if console.is_live:
            console.rule()
    elif not options.json:
        print_samples(title, [prompt + text for text in texts], console)
    data = {"prompt_ids": prompt_ids, "ids": sequences, "text": texts, "model": loaded.source}
    return Result(ExitCode.DONE, data)


def write(text: str, console: Console) -> None:
    """Write generated text to stdout; on a terminal, escape control characters."""
    sys.stdout.write(spell_controls(text) if console.is_live else text)
    sys.stdout.flush()


def print_samples(title: str, texts: list[str], console: Console) -> None:
    """Print several texts with a line between them."""
    if console.is_live:
        console.fence(title, texts)
    else:
        print(f"\n{'-' * 40}\n".join(texts))
