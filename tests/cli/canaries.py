"""Secrets in the environment, recipes, addresses and arguments, and commands that meet them."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from tests.tables import read_table

VARIABLES = read_table("""
HF_TOKEN canary01-hub-token
HUGGING_FACE_HUB_TOKEN canary02-old-hub-token
WANDB_API_KEY canary03aaaabbbbccccdddd
AWS_ACCESS_KEY_ID canary04ACCESS
AWS_SECRET_ACCESS_KEY canary05/sec+ret"quoted
AWS_SESSION_TOKEN canary06-session//token==
GITHUB_TOKEN canary07-github
OPENAI_API_KEY canary08-openai
ANTHROPIC_API_KEY canary09-anthropic
AZURE_CLIENT_SECRET canary10-azure
DB_PASSWORD canary11-password
HTTPS_PROXY http://user:canary12-proxy@127.0.0.1:9
HF_ENDPOINT http://user:canary13-mirror@127.0.0.1:9
""")
# Names that stand for secrets in the lines and files below; most are known by their pattern alone.
SECRETS = read_table(f"""
ADDRESS https://user:canary14-pass@host/data
BUCKET s3://KEYID:canary15/sec/ret@bucket/data
TOKEN https://canary16-token@host/x
SIGNED https://host/x?X-Amz-Signature=canary17abcdef&y=1
WEBHOOK https://hooks.slack.com/services/T00/B00/canary21
HUB hf_canary18abcdefghijklmnop
GITHUB ghp_canary19abcdefghijklmnop
SK sk-canary20-abcdefghijklmnop
ENV_HUB {VARIABLES["HF_TOKEN"]}
ENV_OPENAI {VARIABLES["OPENAI_API_KEY"]}
ENV_WANDB {VARIABLES["WANDB_API_KEY"]}
""")
CANARIES = [f"canary{number:02d}" for number in range(1, 22)]
RECIPE = """\
model: {n_layer: 1, n_head: 2, d_model: 16, seq_len: 128}
data: {path: data}
budget: {steps: 2, batch_tokens: 256}
machine: {device: cpu, precision: fp32, micro_batch: 2, threads: 1}
evaluate: {every: 0, tokens: 64}
sample: {every: 2steps, tokens: 2, prompt: "to HUB ENV_OPENAI TOKEN"}
log: {plots: false}
"""
COMPOSER = """\
max_duration: 1ba
train_batch_size: 4
max_seq_len: 64
model: {name: gpt2, n_layer: 1, n_head: 2, n_embd: 16}
optimizers: {adamw: {lr: 1e-3}}
schedulers: {constant: {}}
loggers: {wandb: {init_kwargs: {api_key: SK}}}
train_dataset: {remote: BUCKET}
load_path: BUCKET
"""


TRAIN = "train in/tiny.yaml --out run"
PREPARE = "prepare in/text.txt --out data --tokenizer bytes --workers 1 --val-fraction 0"
SUCCEEDING = f"""
{PREPARE}
{TRAIN} --explain sample.num_samples=2 evaluate.tasks=piqa? evaluate.tasks_data=SIGNED
config in/tiny.yaml evaluate.tasks=piqa evaluate.tasks_data=ADDRESS --json
sample run "to GITHUB" --tokens 1 --json
eval run --data in/text.txt --limit 32 --json
export run --out export
launch slurm in/tiny.yaml --nproc 1 --write job.sh "sample.prompt=ADDRESS SIGNED"
launch k8s in/tiny.yaml --nproc 1 sample.prompt=SK
verify run
"""
FAILING = f"""
{TRAIN} model.n_layer=2 model.init=ADDRESS
{TRAIN} data.path=ADDRESS
train in/tiny.yaml --out new model.init=SIGNED
train in/tiny.yaml --out BUCKET
train --composer in/composer.yaml
train --llmc "-e d12 -i BUCKET/t.bin -j BUCKET/val.bin"
train --nanogpt "--wandb_log=SK --dataset=TOKEN"
{TRAIN} --hf-token canary18-on-the-line
{TRAIN} --api_key=canary20-on-the-line
{TRAIN} optim.lr=ENV_HUB
{TRAIN} log.alert=WEBHOOK
prepare ADDRESS --out other
sample TOKEN x
export SIGNED --out other
plot ENV_WANDB --debug
"""


def fill(text: str) -> str:
    """Replace the names that stand for secrets."""
    names = re.compile(rf"\b({'|'.join(SECRETS)})\b")
    return names.sub(lambda match: SECRETS[match[0]], text)


def write_inputs(folder: Path) -> None:
    """Write a text, and recipes that hold secrets."""
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    (folder / "tiny.yaml").write_text(fill(RECIPE))
    (folder / "composer.yaml").write_text(fill(COMPOSER))


def list_commands() -> list[list[str]]:
    """Return command lines with secrets, those that succeed first, in an order that works."""
    lines = (SUCCEEDING + FAILING).split("\n")
    return [[fill(argument) for argument in shlex.split(line)] for line in lines if line]


def find_canaries(texts: Iterable[str], folder: Path) -> list[str]:
    """Return `canary: source` for each secret in an output, or in a file that a command wrote."""
    contents = {f"output {number}": text.encode() for number, text in enumerate(texts)}
    for path in folder.rglob("*"):
        if path.is_file() and (name := path.relative_to(folder)).parts[0] != "in":
            contents[str(name)] = path.read_bytes()
    return [
        f"{name}: {source}"
        for source, data in contents.items()
        for name in CANARIES
        if name.encode() in data
    ]
