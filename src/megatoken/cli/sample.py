"""`megatoken sample`: continue a prompt with a model."""

import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatoken.config.schema import MachineConfig
from megatoken.console import Console, spell_controls
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_template import find_stop_ids
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import TextStream, describe_window, generate_ids, prepare_decoding
from megatoken.system.device import memory_errors, open_device


@memory_errors("sample", "use --precision bf16 or --device cpu, or lower --n and --tokens")
def sample(options: Namespace, prompt: str) -> dict[str, Any]:
    """Print the continuation while it is generated, unless `--json`; return it as ids and text without the prompt.

    Raises ConfigError for numbers out of range.
    """
    sampling = Sampling(
        options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    messages = Console(to_stderr=True)
    loaded = load_pretrained(options.model, messages.warn)
    device = open_device(MachineConfig(device=options.device, precision=options.precision))
    model, tokenizer = loaded.model.to(device.torch_device), loaded.tokenizer
    prepare_decoding(model, device, int8=options.int8)
    prompt_ids = tokenizer.encode(prompt).tolist()
    start_ids = tokenizer.start_ids(prompt_ids)
    if note := describe_window(model.config, len(start_ids), options.tokens):
        messages.print(f"note: {note}")
    streams = options.n == 1 and not options.json
    stream, pending = TextStream(tokenizer, prompt_ids), [prompt]
    shown = (
        spell_controls if options.console.is_live else str
    )  # a file or pipe gets the text alone, as it is
    title = f"{loaded.source}: sample"

    def print_tokens(ids: list[int | None]) -> None:
        sys.stdout.write(
            shown(
                (pending.pop() if pending else "") + ("" if ids[0] is None else stream.push(ids[0]))
            )
        )
        sys.stdout.flush()

    if streams and options.console.is_live:
        options.console.rule(title)

    sequences = generate_ids(
        model,
        start_ids,
        replace(sampling, stop_ids=find_stop_ids(tokenizer)),
        num_samples=options.n,
        device=device,
        on_tokens=print_tokens if streams else None,
    )
    texts = [tokenizer.decode_after(prompt_ids, ids) for ids in sequences]
    if streams:
        print(shown(stream.push(None)), flush=True)
        if options.console.is_live:
            options.console.rule()
    elif options.console.is_live and not options.json:
        options.console.fence(title, [prompt + text for text in texts])
    elif not options.json:
        print(("\n" + "-" * 40 + "\n").join(prompt + text for text in texts))
    return {"prompt_ids": prompt_ids, "ids": sequences, "text": texts, "model": loaded.source}
