"""Secrets in the environment, recipes, addresses and arguments, and commands that meet them."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

VARIABLES = {
    "HF_TOKEN": "canary01-hub-token",
    "HUGGING_FACE_HUB_TOKEN": "canary02-old-hub-token",
    "WANDB_API_KEY": "canary03aaaabbbbccccdddd",
    "AWS_ACCESS_KEY_ID": "canary04ACCESS",
    "AWS_SECRET_ACCESS_KEY": 'canary05/sec+ret"quoted',
    "AWS_SESSION_TOKEN": "canary06-session//token==",
    "GITHUB_TOKEN": "canary07-github",
    "OPENAI_API_KEY": "canary08-openai",
    "ANTHROPIC_API_KEY": "canary09-anthropic",
    "AZURE_CLIENT_SECRET": "canary10-azure",
    "DB_PASSWORD": "canary11-password",
    "HTTPS_PROXY": "http://user:canary12-proxy@127.0.0.1:9",
    "HF_ENDPOINT": "http://user:canary13-mirror@127.0.0.1:9",
}
# In words and files, known by their form alone.
WRITTEN = {
    "address": "https://user:canary14-pass@host/data",
    "bucket": "s3://KEYID:canary15/sec/ret@bucket/data",
    "token address": "https://canary16-token@host/x",
    "signed": "https://host/x?X-Amz-Signature=canary17abcdef&y=1",
    "hub": "hf_canary18abcdefghijklmnop",
    "github": "ghp_canary19abcdefghijklmnop",
    "key": "sk-canary20-abcdefghijklmnop",
}
CANARIES = [f"canary{number:02d}" for number in range(1, 21)]
RECIPE = """\
model: {n_layer: 1, n_head: 2, d_model: 16, seq_len: 128}
data: {path: DATA}
budget: {steps: 2, batch_tokens: 256}
machine: {device: cpu, precision: fp32, micro_batch: 2, threads: 1}
evaluate: {every: 0, tokens: 64}
sample: {every: 2steps, tokens: 2, prompt: "PROMPT"}
log: {plots: false}
"""
COMPOSER = """\
max_duration: 1ba
train_batch_size: 4
max_seq_len: 64
model: {name: gpt2, n_layer: 1, n_head: 2, n_embd: 16}
optimizers: {adamw: {lr: 1e-3}}
schedulers: {constant: {}}
loggers: {wandb: {init_kwargs: {api_key: KEY}}}
train_dataset: {remote: BUCKET}
load_path: BUCKET
"""


def write_inputs(folder: Path) -> None:
    """A text, and recipes that hold secrets."""
    (folder / "in").mkdir()
    (folder / "in" / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    prompt = f"to {WRITTEN['hub']} {VARIABLES['OPENAI_API_KEY']} {WRITTEN['token address']}"
    (folder / "in" / "tiny.yaml").write_text(
        RECIPE.replace("DATA", "data").replace("PROMPT", prompt)
    )
    composer = COMPOSER.replace("KEY", WRITTEN["key"]).replace("BUCKET", WRITTEN["bucket"])
    (folder / "in" / "composer.yaml").write_text(composer)


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
launch k8s in/tiny.yaml --nproc 1 sample.prompt=KEY
verify run
"""
FAILING = f"""
{TRAIN} model.n_layer=2 model.init=ADDRESS
{TRAIN} data.path=ADDRESS
train in/tiny.yaml --out new model.init=SIGNED
train in/tiny.yaml --out BUCKET
train --composer in/composer.yaml
train --llmc "-e d12 -i BUCKET/t.bin -j BUCKET/val.bin"
train --nanogpt "--wandb_log=KEY --dataset=TOKEN"
{TRAIN} --hf-token canary18-on-the-line
{TRAIN} --api_key=canary20-on-the-line
{TRAIN} optim.lr=HUB
prepare ADDRESS --out other
sample TOKEN x
export SIGNED --out other
plot WANDB --debug
"""
SECRETS = {
    "ADDRESS": WRITTEN["address"],
    "SIGNED": WRITTEN["signed"],
    "GITHUB": WRITTEN["github"],
    "KEY": WRITTEN["key"],
    "BUCKET": WRITTEN["bucket"],
    "TOKEN": WRITTEN["token address"],
    "HUB": VARIABLES["HF_TOKEN"],
    "WANDB": VARIABLES["WANDB_API_KEY"],
}


def list_commands() -> list[list[str]]:
    """Return command lines with secrets, those that succeed first, in an order that works."""
    secret = re.compile("|".join(SECRETS))
    return [
        [secret.sub(lambda match: SECRETS[match[0]], word) for word in shlex.split(line)]
        for line in (SUCCEEDING + FAILING).split("\n")
        if line
    ]


def find_canaries(texts: Iterable[str], folder: Path) -> list[str]:
    """Return `canary: place` for each secret in the outputs or in a file that a command wrote."""
    places = {f"output {number}": text.encode() for number, text in enumerate(texts)}
    for path in folder.rglob("*"):
        if path.is_file() and "in" not in path.relative_to(folder).parts[:1]:
            places[str(path.relative_to(folder))] = path.read_bytes()
    return [
        f"{name}: {place}"
        for place, data in places.items()
        for name in CANARIES
        if name.encode() in data
    ]
