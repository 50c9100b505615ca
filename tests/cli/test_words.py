"""What people type who come from other tools, or slip: one line, an exit code, and the suggestion they meant.

The first list was found by users, the second collects the words of nanoGPT, llm.c, modded-nanogpt, nanochat, litgpt,
torchtitan, Megatron, Composer and the Trainer of transformers.
"""

import os
import shlex
from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.config.fields import parse_value
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS
from megatoken.config.words import CHOICES, CONVERSIONS, KEYS, MAIN_FIELDS, RECIPES, VALUES, find_key
from megatoken.convert.recipes import composer, nanogpt

TOKENS = "it counts tokens: sequences x model.seq_len"
SETTING = "settings are section.field=value, without --: "
FOUND = [
    ("config quickstart optim.learning_rate=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart model.n_embd=8", 2, "did you mean 'model.d_model'?"),
    ("config quickstart model.block_size=8", 2, "did you mean 'model.seq_len'?"),
    ("train gpt2", 2, "did you mean 'gpt2-124m'?"),
    ("describe gpt2-xl", 2, "did you mean 'gpt2-1558m'?"),
    ("trian quickstart", 2, "did you mean train?"),
    ("train quickstart --data.path=d", 2, f"{SETTING}data.path=d"),
    ("config quickstart optim.lrr=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart model.padded_vocab_size=8", 2, "did you mean 'model.vocab_size'?"),
    ("train quikstart", 2, "did you mean 'quickstart'?"),
    ("sample runs/nope hello", 4, "no such folder — runs/nope — did you mean runs/nose?"),
    ("sample runs/zz hello", 4, "no such folder — runs/zz — give a run folder"),
    ("train fifo.yaml", 2, "no recipe named 'fifo.yaml', and no such file or run folder — known: "),
    ("train ''", 2, "no recipe named '' — known: "),
    ("train 'null:'", 2, "no recipe named 'null:' — known: "),
    ("train 'a\x01b'", 2, "no recipe named 'a\\x01b' — known: "),
    ("config quickstart 'null:=3'", 2, "settings are section.field=value"),
    ("config quickstart zzz=1", 2, "settings are section.field, sections model, data, objective"),
    ("config quickstart model.foo=3", 2, "model has preset, n_layer"),
    ("config quickstart evaluate.eval_iters=8", 2, "'evaluate.tokens'? it counts tokens: batches x sequences x model"),
    ("config quickstart budget.batch_size=8", 2, f"did you mean 'budget.batch_tokens'? {TOKENS}"),
    ("prepare fifo --out d", 3, "neither a file nor a folder — fifo — write its content to a file first"),
    ("prepare python --out d --tokenizer gpt-2", 2, "did you mean gpt2?"),
    ("eval m --tasks hella_swag", 2, "did you mean hellaswag?"),
    ("eval m --data d --split trian", 2, "did you mean train?"),
    ("eval m --data d --tasks piqa --split train", 2, "--split has no effect here"),
    ("launch slrum quickstart", 2, "did you mean slurm?"),
    ("config quickstart save.time_limit=soon", 2, "write it as 45s, 90m, 11h30m or 2d"),
    ("bench ladders", 2, "did you mean ladder?"),
]
NEW = [
    ("train quickstart optim.fused=true", 2, "did you mean 'machine.adamw'?"),
    (
        "plan gpt2-124m --gpus 8 --gpu H100",
        2,
        "unrecognized arguments: --gpu H100 — megatoken plan — did you mean --gpus?",
    ),
    ("race quickstart shakespeare --tokens 1M --seed 7", 2, "without --: seed=7"),
    ("sample m Once upon a time", 2, "put the prompt in quotes: 'Once upon a time'"),
    ("sample m hi --temperature 0 --top-k 5", 2, "it is for temperatures above 0"),
    ("sample m hi --temperature 0 -n 3", 2, "these texts would be the same"),
    ("chat m --temperature 0 --top-p 0.9", 2, "it is for temperatures above 0"),
    ("train quickstart --init ''", 2, "--init is empty"),
    ("train quickstart --init a model.init=b", 2, "--init and model.init=b are both given"),
    ("train quickstart --overfit-batch data.order=sequential", 2, "--overfit-batch sets data.order: give one"),
    ("dryrun gpt2-124m --gpus 2 --tp 2 machine.tensor_parallel=1", 2, "--tp sets machine.tensor_parallel: give one"),
    ("eval m --tasks ''", 2, "--tasks is empty — megatoken eval — name tasks: hellaswag, "),
    ("eval m --data d --harness", 2, "--harness without --tasks"),
    ("launch aws gpt2-124m", 2, "did you mean skypilot?"),
    ("config quickstart optim.warmup=100ba", 2, "did you mean 100steps?"),
    ("config quickstart 'model.n_layer = 3'", 2, "settings are section.field=value: model.n_layer=3"),
    ("train quickstart budget.steps:5", 2, "in one word: budget.steps=5"),
    ("train d20", 2, "did you mean 'depth-20'?"),
    ("train depth_8", 2, "did you mean 'depth-8'?"),
    ("train finetune_shakespeare", 2, "did you mean 'finetune'?"),
    ("serve m --tensor-parallel-size 2", 2, "machine.tensor_parallel splits a model that trains"),
    ("train quickstart evaluate.steps=10", 2, "did you mean 'evaluate.every'?"),
    ("train quickstart save.path=x", 2, "did you mean '--out'?"),
    ("train quickstart use_lora=true", 2, "no LoRA"),
    ("train quickstart n_expert=8", 2, "no mixture of experts"),
    *(
        (f"{theirs} x", 2, f"did you mean {ours}?")
        for theirs, ours in (
            ("tok_train", "prepare"),
            ("base_train", "train"),
            ("base_eval", "eval"),
            ("chat_sft", "train"),
            ("chat_cli", "chat"),
            ("chat_web", "serve"),
            ("chat_eval", "eval"),
            ("finetune_full", "train"),
        )
    ),
    ("train quickstart report_to=wandb", 2, "did you mean 'log.sinks'?"),
    ("train quickstart --wandb_project=x", 2, "log.sinks=wandb sends the run, by its folder's name"),
    ("sample m hi --load-in-8bit", 2, "did you mean --int8?"),
    ("config --nanogpt --learning_rate=0.0", 2, "learning_rate"),
    ("tune quickstart", 2, "did you mean sweep?"),
    ("price gpt2-124m", 2, "did you mean plan?"),
    ("repl m", 2, "did you mean chat?"),
    ("upload m", 2, "did you mean export?"),
    ("flops gpt2-124m", 2, "did you mean describe?"),
    ("deploy m", 2, "did you mean serve?"),
    ("prepare python --out d --tokenizer bpe=4096", 2, "did you mean bpe:4096?"),
    ("prepare python --out d --tokenizer bpe:50k", 2, "did you mean bpe:50000?"),
    (
        "sample gpt2-124m hi",
        4,
        "a recipe, not a model — gpt2-124m — train it: megatoken train gpt2-124m, and give runs/g",
    ),
    (
        "sample weights.safetensors hi",
        4,
        "without their sizes and tokenizer — weights.safetensors — give the folder: .",
    ),
    ("eval m --ppl", 2, "without --tasks it is printed"),
    ("report m --out m.pdf", 2, "the report is a page of HTML — m.pdf — --out m.html"),
    ("launch slurm gpt2-124m --gpus-per-node 8", 2, "did you mean --nproc?"),
    ("launch slurm gpt2-124m --nodes 1.5", 2, "'1.5' — megatoken launch — give a whole number"),
    ("config quickstart optim.schedule=step", 2, "did you mean multi-step?"),
    (
        "train quickstart optim.lrr=1 model.n_layr=2",
        2,
        "unknown keys 'optim.lrr', 'model.n_layr' — command line — "
        "did you mean 'optim.lr'? did you mean 'model.n_layer'?",
    ),
    ("train quickstart --lr=1e-3 --outt x", 2, f"{SETTING}optim.lr=1e-3; did you mean --out?"),
    ("train runs", 2, "'runs' is a folder without a run — if it is a dataset: megatoken train RECIPE data.path=runs"),
    ("train finetune data.path=d", 2, "no weights to go on with — --init — name a run or a Hugging Face folder"),
    ("launch slurm finetune --nproc 1 data.path=d", 2, "no weights to go on with — --init — name a run"),
    ("describe nope", 2, "shakespeare, depth-N, llama-15m, "),
    ("prepare a.txt b.txt --out d", 2, "give one SOURCE: a folder, or a pattern in quotes, such as 'texts/*.txt'"),
    ("prepare openwebtext --out d", 3, "of another corpus name the folder of its .parquet, .jsonl or .txt files"),
    ("sweep quickstart --runs 8", 2, "did you mean --trials?"),
    ("eval a b --plot", 2, "argument --plot: expected one argument — megatoken eval — give a value; one that begins"),
    (
        "verify memory://nothing",
        3,
        "shards — memory://nothing — check the address: `megatoken prepare SOURCE --out ADDRESS`",
    ),
    ("train quickstart --learning_rate=1e-3", 2, f"{SETTING}optim.lr=1e-3"),
    ("train quickstart --lr 1e-3", 2, f"{SETTING}optim.lr=1e-3"),
    ("train quickstart --batch_size=32", 2, f"{SETTING}budget.batch_tokens=... {TOKENS}"),
    ("train quickstart --max_iters=100", 2, f"{SETTING}budget.steps=100"),
    ("train quickstart --compile=False", 2, f"{SETTING}machine.compile=off"),
    ("train quickstart --device=cuda", 2, f"{SETTING}machine.device=cuda"),
    ("train quickstart --dtype bfloat16", 2, f"{SETTING}machine.precision=bf16"),
    ("train quickstart --gradient_accumulation_steps=8", 2, "machine.micro_batch=... accumulation is what remains"),
    ("train quickstart --config x.yaml", 2, "unrecognized arguments: --config x.yaml"),
    ("train --config x.yaml", 2, "write RECIPE alone, without --config"),
    ("train config/train_gpt2.py", 2, "did you mean --nanogpt 'config/train_gpt2.py'?"),
    ("train train_gpt2", 2, "did you mean 'gpt2-124m'?"),
    ("train gpt2-medium", 2, "did you mean 'gpt2-355m'?"),
    ("train openai-community/gpt2-large", 2, "did you mean 'gpt2-774m'?"),
    ("train gpt2-1.5B", 2, "did you mean 'gpt2-1558m'?"),
    ("train shakespeare_char", 2, "did you mean 'shakespeare'?"),
    ("train llama", 2, "did you mean 'llama-110m' or 'llama-5m'?"),
    ("train meta-llama/Llama-3.2-1B", 2, "llama3.2-1b is a preset, not a recipe: RECIPE model.preset=llama3.2-1b"),
    ("describe llama3.2-1", 2, "did you mean 'llama3.2-1b'?"),
    ("train openwebtext", 2, "no recipe named 'openwebtext' — known: "),
    ("train quickstart --out_dir=x", 2, "did you mean --out?"),
    ("train quickstart --output_dir x", 2, "did you mean --out?"),
    ("train quickstart --nproc gpu", 2, "give a whole number"),
    ("train quickstart --nproc_per_node 2", 2, "did you mean --nproc?"),
    ("train quickstart --resume", 2, "the same command goes on with its run"),
    ("train quickstart --wandb_log=True", 2, f"{SETTING}log.sinks=... name them: wandb, tensorboard"),
    ("config quickstart lr=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart n_embd=8", 2, "did you mean 'model.d_model'?"),
    ("config quickstart optimizer.lr=1", 2, "did you mean 'optim.lr'?"),
    ("config quickstart training.steps=8", 2, "did you mean 'budget.steps'?"),
    ("config quickstart training.local_batch_size=8", 2, "did you mean 'machine.micro_batch'?"),
    ("config quickstart checkpoint.interval=8", 2, "did you mean 'save.every'?"),
    ("config quickstart parallelism.tensor_parallel_degree=8", 2, "did you mean 'machine.tensor_parallel'?"),
    ("config quickstart warmup_ratio=0.1", 2, "did you mean 'optim.warmup'? 0.1 is written 0.1dur"),
    ("config quickstart min_lr=1e-5", 2, "did you mean 'optim.min_lr_ratio'? it is a share of optim.lr"),
    ("config quickstart total_batch_size=524288", 2, "did you mean 'budget.batch_tokens'?"),
    (
        "config quickstart optim=adamw_torch",
        2,
        "optim is a section, got 'adamw_torch' — command line — did you mean optim.name=adamw?",
    ),
    ("config quickstart optim.name=adam", 2, "did you mean adamw?"),
    ("config quickstart optim.name=sgd", 2, "expected one of adamw"),
    ("config quickstart optim.schedule=cosine_with_warmup", 2, "did you mean cosine?"),
    ("config quickstart optim.schedule=warmup_stable_decay", 2, "did you mean wsd?"),
    ("config quickstart machine.precision=float16", 2, "did you mean fp16?"),
    ("config quickstart machine.precision=bfloat16", 2, "did you mean bf16?"),
    ("config quickstart machine.compile=True", 2, "did you mean on?"),
    ("config quickstart machine.tf32=1", 2, "did you mean true?"),
    ("config quickstart machine.sharding=FULL_SHARD", 2, "did you mean zero3?"),
    ("config quickstart machine.attention=sdpa", 2, "did you mean flash?"),
    ("config quickstart machine.activation_checkpointing=full", 2, "did you mean block?"),
    ("config quickstart model.pos_emb=rope", 2, "did you mean rotary?"),
    ("config quickstart budget.tokens=10GB", 2, "expected a whole number, got '10GB'"),
    ("pretrain gpt2-xl", 2, "no command 'pretrain' — megatoken — did you mean train? known: quickstart, completion, "),
    ("gpt2-124m", 2, "did you mean train gpt2-124m? known: "),
    ("plot runs/a --x time", 2, "--x cannot be 'time' — megatoken plot — did you mean seconds? known: tokens, steps, "),
    ("runs --sort val", 2, "did you mean val_loss?"),
    ("bench peers --against x", 2, "megatoken bench peers — see `megatoken bench peers --help`"),
    ("prepare python --out d --val-fraction 10%", 2, "give a number such as 0.1, see"),
    ("prepare HuggingFaceFW/fineweb --out d", 3, "did you mean fineweb?"),
    ("quickstart text.txt", 2, "your text is named by --data text.txt"),
    ("train gpt2-125m", 2, "did you mean 'gpt2-124m'?"),
    ("train gpt4", 2, "no recipe named 'gpt4' — known: "),
    ("train corpus.jsonl", 2, "text is trained on by: megatoken quickstart --data corpus.jsonl; recipes: "),
    ("train out/ckpt.pt", 2, "a model goes on by: train finetune --init out/ckpt.pt data.path=DATA; recipes: "),
    ("eval nope.txt", 2, "text, not a model — nope.txt — give a model, and the text as --data nope.txt"),
    ("eval nope", 2, "nothing to evaluate on, and no run 'nope' here — megatoken eval — give --tasks ("),
    ("sample nope.txt hi", 4, "text, not a model — nope.txt — give a run; to train one on the text: megatoken quickst"),
    ("train quickstart data.path=shards/train_*.bin", 3, "check the pattern; or make shards: megatoken prepare SOURCE"),
    (
        "train quickstart --nproc 64 data.path=d",
        2,
        "2 sequences does not divide among 64 data-parallel processes — --np",
    ),
    ("verify gs://bucket/data", 2, "— gs://bucket/data — pip install 'gcsfs'"),
    ("pretrain quickstart", 2, "did you mean train?"),
    ("generate runs/x", 2, "did you mean sample?"),
    ("tokenize text.txt", 2, "did you mean prepare?"),
    ("gpt2", 2, "no command 'gpt2' — megatoken — known: quickstart, "),
    ("sample m --max_new_tokens=10", 2, "did you mean --tokens?"),
    ("sample m --start hi", 2, "write PROMPT alone, without --start"),
    ("export m --format hf --out d", 2, "did you mean --to?"),
    ("export m --to safetensors --out d", 2, "did you mean hf?"),
    ("launch kubernetes quickstart", 2, "did you mean k8s?"),
    ("prepare fineweb10B --out d", 3, "did you mean fineweb?"),
    ("prepare shakespeare_char --out d", 3, "did you mean tinyshakespeare?"),
    ("prepare python --out d --tokenizer char", 2, "did you mean bytes?"),
    ("prepare python --out d --tokenizer bpe", 2, "did you mean bpe:N?"),
]
MEANT = [  # of the words of nanoGPT, litgpt, torchtitan, Composer, nanochat and the Trainer
    ("config quickstart machine.compile=reduce-overhead", 2, "did you mean graphs?"),
    ("config quickstart data.order=random", 2, "did you mean shuffled?"),
    ("config quickstart objective.name=instruct", 2, "did you mean sft?"),
    ("config quickstart model=gpt2-124m", 2, "did you mean model.preset=gpt2-124m?"),
    ("plot m --y loss", 2, "every value of the run has its panel"),
    ("plot m --smooth 10", 2, "see `megatoken plot --help`"),
    ("plot m --show", 2, "see `megatoken plot --help`"),
    ("eval m --tasks-data d", 2, "did you mean --data?"),
    ("eval m --text d", 2, "did you mean --data?"),
    ("eval --model m --tasks piqa", 2, "write MODEL alone, without --model"),
    ("eval m --tokenizer gpt2", 2, "the model's folder has its tokenizer"),
    ("eval m --log_samples", 2, "did you mean --examples?"),
    ("eval m --apply_chat_template", 2, "--no-template leaves it out"),
    ("sample m hi --stop x", 2, "see `megatoken sample --help`"),
    ("sample m hi --min-p 0.1", 2, "see `megatoken sample --help`"),
    ("sample m hi --greedy", 2, "--temperature 0 takes the likeliest token"),
    ("prepare t.txt --out d --num_workers 8", 2, "did you mean --workers?"),
    ("prepare t.txt --out d --column content", 2, "did you mean --text-key?"),
    ("launch slurm gpt2-124m --qos high", 2, "did you mean --sbatch?"),
    ("launch slurm gpt2-124m --ntasks 8", 2, "did you mean --nproc?"),
    ("launch slurm gpt2-124m --nnodes 2", 2, "did you mean --nodes?"),
    ("plan gpt2-124m --gpus 8xH100 --cost 2", 2, "did you mean --price?"),
    ("plan gpt2-124m --gpus 8xH100 --time 2h", 2, "did you mean --deadline?"),
    ("sweep quickstart --workers 2", 2, "did you mean --jobs?"),
    ("race quickstart quickstart --n 3", 2, "did you mean --seeds?"),
    ("report m --port 8000", 2, "did you mean --serve?"),
    ("serve m --address 0.0.0.0", 2, "did you mean --host?"),
    ("bench matmul", 2, "did you mean gemm?"),
    ("bench ladder --model gpt2-124m", 2, "did you mean --preset?"),
    ("train gpt2-124m -e d12 -b 64", 2, "flags of llm.c are one word: --llmc '-e d12 -b 64'"),
    ("quickstart --fast", 2, "see `megatoken quickstart --help`"),
    ("quickstart --input a.txt", 2, "did you mean --data?"),
]
# As setting=value, and what --setting=value and --setting value are answered with.
SETTINGS = [
    ("per_device_train_batch_size=8", "did you mean 'machine.micro_batch'?", "machine.micro_batch=8"),
    ("max_steps=100", "did you mean 'budget.steps'?", "budget.steps=100"),
    ("weight_decay=0.1", "did you mean 'optim.weight_decay'?", "optim.weight_decay=0.1"),
    ("adam_beta2=0.95", "did you mean 'optim.beta2'?", "optim.beta2=0.95"),
    ("num_train_epochs=3", "did you mean 'budget.epochs'?", "budget.epochs=3"),
    (
        "gradient_checkpointing=True",
        "did you mean 'machine.activation_checkpointing'?",
        "machine.activation_checkpointing=block",
    ),
    (
        "activation_checkpoint.mode=full",
        "did you mean 'machine.activation_checkpointing'?",
        "machine.activation_checkpointing=block",
    ),
    ("n_kv_head=2", "did you mean 'model.n_kv_head'?", "model.n_kv_head=2"),
    ("rope_base=10000", "did you mean 'model.rope_theta'?", "model.rope_theta=10000"),
    ("compile=False", "did you mean 'machine.compile'?", "machine.compile=off"),
    ("wandb_log=True", "did you mean 'log.sinks'? name them: ", "log.sinks=... name them: "),
    ("init_from=resume", "the same command goes on with its run", "the same command goes on with its run"),
    ("init_from=gpt2", "did you mean 'model.init'?", "model.init=gpt2"),
    ("report_to=none", "nothing is sent unless log.sinks names", "nothing is sent unless log.sinks names"),
    ("eval_interval=100", "did you mean 'evaluate.every'?", "evaluate.every=100"),
    ("device_batch_size=8", "did you mean 'machine.micro_batch'?", "machine.micro_batch=8"),
    ("depth=12", "is the recipe depth-N", "is the recipe depth-N"),
    ("tp_degree=2", "did you mean 'machine.tensor_parallel'?", "machine.tensor_parallel=2"),
    ("save_interval=100", "did you mean 'save.every'?", "save.every=100"),
    (
        "lr_decay_iters=1000",
        "did you mean 'optim.decay'? 0.4 is written 0.4dur; iterations count from",
        "optim.decay=... 0.4 is",
    ),
    ("warmup_iters=100", "did you mean 'optim.warmup'?", "optim.warmup=100"),
    ("min_lr=6e-5", "did you mean 'optim.min_lr_ratio'? it is a share", "optim.min_lr_ratio=... it is a share"),
    (
        "always_save_checkpoint=True",
        "did you mean 'save.keep_best'? False is save.keep_best=true",
        "save.keep_best=... False is",
    ),
    ("flash_attn=True", "did you mean 'machine.attention'?", "machine.attention=flash"),
    ("hidden_size=768", "did you mean 'model.d_model'?", "model.d_model=768"),
    ("intermediate_size=3072", "did you mean 'model.d_ff'?", "model.d_ff=3072"),
    ("mlp_ratio=4", "did you mean 'model.d_ff'? a width: the ratio x model.d_model", "model.d_ff=... a width"),
    ("num_hidden_layers=12", "did you mean 'model.n_layer'?", "model.n_layer=12"),
    ("rms_norm_eps=1e-5", "did you mean 'model.norm_eps'?", "model.norm_eps=1e-5"),
    ("tie_word_embeddings=True", "did you mean 'model.tie_embeddings'?", "model.tie_embeddings=True"),
    ("early_stopping_patience=3", "did you mean 'evaluate.patience'?", "evaluate.patience=3"),
    ("load_best_model_at_end=True", "did you mean 'save.keep_best'?", "save.keep_best=True"),
    ("unembedding_lr=0.004", "did you mean 'optim.lr'? AdamW has one rate", "optim.lr=... AdamW has one rate"),
    ("optim=adamw_torch", "did you mean optim.name=adamw?", "optim.name=adamw"),
    ("optimizer.implementation=fused", "did you mean 'machine.adamw'?", "machine.adamw=fused"),
    ("icl_tasks=piqa", "did you mean 'evaluate.tasks'?", "evaluate.tasks=piqa"),
    ("sliding_window=1024", "did you mean 'model.window'?", "model.window=1024"),
    ("head_dim=128", "it is model.d_model / model.n_head", "it is model.d_model / model.n_head"),
    ("pipeline_parallel_degree=2", "no pipeline, context or expert parallelism", "no pipeline, context or expert"),
    ("parallelism.context_parallel_degree=2", "no pipeline, context or expert", "no pipeline, context or expert"),
    ("dataloader_num_workers=4", "without workers", "without workers"),
    ("eval_only=True", "megatoken eval RUN measures without training", "megatoken eval RUN measures without training"),
    ("wandb_project=x", "log.sinks=wandb sends the run", "log.sinks=wandb sends the run"),
    ("fp8=True", "no FP8: machine.precision is", "no FP8: machine.precision is"),
    ("num_nodes=2", "megatoken launch ENGINE RECIPE --nodes N", "megatoken launch ENGINE RECIPE --nodes N"),
    ("push_to_hub=True", "megatoken export RUN --to hf", "megatoken export RUN --to hf"),
    ("machine.nproc=2", "did you mean '--nproc'?", "did you mean --nproc?"),
    ("lr_decay_ratio=0.4", "'optim.decay'? 0.4 is written 0.4dur", f"{SETTING}optim.decay=... 0.4 is written 0.4dur"),
    ("init_std=0.02", "initial weights are GPT-2's", "initial weights are GPT-2's"),
    ("pin_memory=true", "shards are mapped into memory", "shards are mapped into memory"),
    ("resume_from_step=100", "the same command goes on", "the same command goes on"),
    ("optim.ns_steps=6", "muon takes five steps", "muon takes five steps"),
    ("optimizer.name=adamw", "did you mean 'optim.name'?", f"{SETTING}optim.name=adamw"),
    ("tokenizer.name=gpt2", "did you mean 'data.tokenizer'?", f"{SETTING}data.tokenizer=gpt2"),
    ("experiment_name=x", "did you mean '--out'?", "did you mean --out?"),
]


@pytest.mark.parametrize(("line", "code", "says"), FOUND + NEW + MEANT)
def test_mistakes_get_the_suggestion_that_was_meant(
    line: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nose").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    meant = err.rpartition("did you mean ")[2].partition("?")[0] if "did you mean" in err else ""
    assert not meant or meant in says, "another suggestion"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "fifo", "weights.safetensors"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train runs", "'runs' is a folder of runs — name one: runs/own"),
        ("train runs/onw", "did you mean runs/own?"),
        ("train runs/q", "no recipe named 'runs/q', and no such file or run folder — known: "),
        ("plot runs", "runs/metrics.jsonl — name one of its runs: runs/own"),
        ("report runs", "runs/metrics.jsonl — name one of its runs: runs/own"),
        ("sample hi runs/own", "did you mean megatoken sample runs/own hi?"),
        ("sample runs hi", "a folder of runs, not a model — runs — name one: runs/own"),
        ("train quickstart data.path=a.txt", "a.txt — megatoken prepare a.txt --out data/a, and set data.path=data/a"),
        ("train quickstart data.path=t", "t — megatoken prepare t --out data/t, and set data.path=data/t"),
    ],
)
def test_folders_and_texts_in_the_wrong_place(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "own" / "checkpoints").mkdir(parents=True)
    (tmp_path / "t").mkdir()
    for path in ("a.txt", "t/b.txt"):
        (tmp_path / path).write_text("text")
    assert main(shlex.split(line)) in (2, 3, 4)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("setting", "says", "of_option"), SETTINGS)
def test_settings_of_other_tools_in_three_forms(
    setting: str, says: str, of_option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = setting.partition("=")
    for words, meant in (([setting], says), ([f"--{setting}"], of_option), ([f"--{name}", value], of_option)):
        assert main(["train", "quickstart", *words]) == 2
        assert meant in capsys.readouterr().err, words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["budget.steps", "=", "5"], "settings are section.field=value, in one word: budget.steps=5"),
        (["budget.steps", "=5"], "settings are section.field=value, in one word: budget.steps=5"),
        (["budget.steps:", "5"], "settings are section.field=value, in one word: budget.steps=5"),
        (["optim.lr", "3e-4"], "settings are section.field=value, in one word: optim.lr=3e-4"),
        (["--name", "x"], "did you mean --out?"),
        (["-o", "x"], "did you mean --out? flags of llm.c are one word: --llmc '-o x'"),
        (["--train.max_tokens", "gpt2-124m"], f"{SETTING}budget.tokens=..."),
    ],
)
def test_settings_in_another_form(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("word", ["budget.tokens=1e9tokens", "budget.tokens=10k", "save.time_limit=2h", "log.plots=No"])
def test_other_spellings_of_a_value_are_read(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", word]) == 0


def test_words_stand_for_what_exists() -> None:
    options = {"--out", "--nproc", "--explain"}
    assert set(KEYS.values()) <= FIELDS.keys() | options
    assert CONVERSIONS.keys() <= set(KEYS.values())
    assert all(word in KEYS for words, _ in CONVERSIONS.values() for word in words.split())
    assert not KEYS.keys() & {key.rpartition(".")[2] for key in FIELDS}, "our own names need no translation"
    assert set(MAIN_FIELDS.values()) <= FIELDS.keys()
    for key, words in VALUES.items():
        assert {parse_value(FIELDS[key], value) for value in words.values()} <= set(FIELDS[key].choices)
        assert not words.keys() & set(FIELDS[key].choices)
    assert set(RECIPES.values()) <= PRESETS.keys() | {"shakespeare", "quickstart", "finetune"}
    assert not any(word == ours for word, ours in CHOICES.items())


@pytest.mark.parametrize("table", [nanogpt.TABLE, composer.TABLE])
def test_suggestions_agree_with_the_translators(table: dict[str, nanogpt.Row]) -> None:
    for names, row in table.items():
        for name in names.split() if row.fields and names != "batch_size" else ():  # nanoGPT's is of one forward
            assert find_key(name)[0] in (*row.fields.split(), "optim.beta1"), name  # for betas.1, too
