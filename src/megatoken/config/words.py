"""The words that other tools have for our settings, values, recipes, commands, options: for suggestions.

They are those of nanoGPT, llm.c, modded-nanogpt, nanochat, litgpt, torchtitan, Megatron, Composer and transformers'
Trainer, as far as they are not like ours. What is neither known nor alike gets no suggestion.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from megatoken.config.fields import TRUTHS, ConfigField, parse_value
from megatoken.config.presets import PRESETS, PUBLISHED
from megatoken.config.schema import FIELDS

ALIKE, CHOICES_ALIKE, KEYS_ALIKE, RECIPES_ALIKE = (
    0.6,
    0.7,
    0.75,
    0.7,
)  # of difflib's ratio: less is no slip of the pen


def _invert(table: Mapping[str, str]) -> dict[str, str]:
    return {word: ours for ours, words in table.items() for word in words.split()}


# Setting, or option of a command, by name or by section.name. What is not the same number has a note in CONVERSIONS.
KEYS = _invert(
    {
        "seed": "data_seed global_seed random_seed manual_seed",
        "model.preset": "model_name model.name flavor model_type config_name model_size architecture",
        "model.n_layer": "num_layers num_hidden_layers depth layers n_layers",
        "model.n_head": "num_heads num_attention_heads heads n_heads",
        "model.n_kv_head": "num_key_value_heads n_query_groups num_query_groups n_kv_heads kv_heads",
        "model.d_model": "n_embd hidden_size dim embed_dim d_embed model_dim width",
        "model.d_ff": "intermediate_size n_inner ffn_hidden_size ffn_dim mlp_dim mlp_ratio expansion_ratio ffn_mult",
        "model.vocab_size": "padded_vocab_size n_vocab vocab",
        "model.seq_len": "block_size context_length n_positions max_seq_len n_ctx seq_length sequence_length"
        " train_seq_len max_position_embeddings max_seq_length context",
        "model.mlp": "activation_function hidden_act activation",
        "model.norm": "norm_type norm_class_name normalization",
        "model.norm_eps": "layer_norm_epsilon rms_norm_eps layer_norm_eps norm_epsilon",
        "model.pos_emb": "positions position_embedding_type pos_embed",
        "model.rope_theta": "rope_base rotary_base",
        "model.rope_factor": "rope_scaling",
        "model.window": "sliding_window window_size attention_window",
        "model.bias": "no_bias use_bias",
        "model.tie_embeddings": "tie_word_embeddings weight_tying",
        "model.qk_norm": "use_qk_norm qk_layernorm",
        "model.residual_scales": "resid_lambdas x0_lambdas",
        "model.value_embeddings": "value_embeds",
        "model.logit_softcap": "final_logit_softcapping softcap logits_soft_cap",
        "model.dropout": "attn_pdrop resid_pdrop embd_pdrop emb_pdrop hidden_dropout attention_dropout",
        "model.init": "init_from model_name_or_path load_path initial_checkpoint_dir checkpoint_dir pretrained"
        " resume_from from_pretrained",
        "data.path": "dataset dataset_name dataset.name data.name dataset_path train_files val_files train_file"
        " data_path data_dir data_root input_bin",
        "data.order": "shuffle shuffle_data",
        "data.document_mask": "reset_attention_mask intra_doc_masking packing",
        "data.tokenizer": "tokenizer_path tokenizer_name tokenizer.name tokenizer_dir hf_assets_path",
        "optim.name": "optimizer optimizer_type optimizer.name",
        "optim.lr": "learning_rate max_lr peak_lr adamw_lr embedding_lr adam_lr unembedding_lr scalar_lr base_lr",
        "optim.matrix_lr": "muon_lr",
        "optim.momentum": "muon_momentum mu",
        "optim.momentum_warmup": "momentum_warmup_steps muon_momentum_warmup_steps",
        "optim.cautious_decay": "cautious_weight_decay cautious_wd",
        "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_type decay_lr"
        " scheduler.name lr_scheduler.name",
        "optim.warmup": "warmup_iters warmup_steps t_warmup lr_warmup_steps warmup_ratio"
        " lr_warmup_iters num_warmup_steps",
        "optim.decay": "lr_decay_iters cooldown_frac cooldown_iters warmdown_iters warmdown_ratio decay_ratio"
        " lr_decay_ratio cooldown",
        "optim.min_lr_ratio": "min_lr alpha_f final_lr_frac min_lr_factor",
        "optim.beta1": "betas adam_beta1",
        "optim.beta2": "adam_beta2",
        "optim.eps": "epsilon adam_epsilon",
        "optim.weight_decay": "wd",
        "optim.grad_clip": "max_grad_norm gradient_clipping grad_clip_norm clip_grad max_norm clip_grad_norm"
        " gradient_clip_val",
        "budget.steps": "max_iters max_steps num_iterations train_iters training_steps num_steps iterations"
        " total_steps iters max_train_steps n_steps n_iters",
        "budget.tokens": "max_tokens max_duration num_tokens train_tokens total_tokens"
        " target_param_data_ratio param_data_ratio",
        "budget.epochs": "num_train_epochs num_epochs max_epochs epoch",
        "budget.batch_tokens": "batch_size global_batch_size train_batch_size global_train_batch_size total_batch_size"
        " batch tokens_per_batch tokens_per_step",
        "machine.device": "use_cpu no_cuda accelerator device_type",
        "machine.precision": "dtype bf16 fp16 mixed_precision mixed_precision_param torch_dtype amp param_dtype",
        "machine.compile": "torch_compile use_compile compile.enable",
        "machine.micro_batch": "per_device_train_batch_size gradient_accumulation_steps micro_batch_size"
        " local_batch_size device_batch_size device_train_microbatch_size grad_accum grad_accum_steps"
        " train_micro_batch_size_per_gpu batch_size_per_device accumulate_grad_batches",
        "machine.adamw": "implementation optim_implementation optim.fused fused_adamw",
        "machine.attention": "use_flash_attn attn_implementation attn_impl flash flash_attn",
        "machine.activation_checkpointing": "gradient_checkpointing activation_checkpoint activation_checkpoint.mode"
        " recompute",
        "machine.sharding": "fsdp deepspeed zero_stage fsdp_config data_parallel_shard_degree strategy"
        " sharding_strategy zero_optimization",
        "machine.tensor_parallel": "tp tp_size tp_degree tensor_parallel_degree"
        " tensor_model_parallel_size tensor_parallel_size",
        "machine.threads": "num_threads omp_num_threads cpu_threads",
        "save.every": "save_interval save_steps save_strategy save_freq checkpoint_interval checkpoint.interval"
        " ckpt_every save_checkpoint checkpoint.freq save_every"
        " checkpoint_every every_n_train_steps",
        "save.keep_last": "save_total_limit save_num_checkpoints_to_keep keep_latest_k max_checkpoints",
        "save.keep_best": "load_best_model_at_end always_save_checkpoint save_best",
        "save.time_limit": "max_time walltime",
        "evaluate.every": "eval_interval eval_steps eval_every eval_strategy evaluation_strategy val_loss_every"
        " validate_every_n_epochs validate_every_n_batches"
        " eval.interval validation.freq val_every eval_freq val_interval val_check_interval"
        " evaluate.steps",
        "evaluate.patience": "early_stopping_patience early_stopping early_stopper",
        "evaluate.tasks": "icl_tasks eval_tasks benchmarks",
        "evaluate.tokens": "eval_iters val_tokens eval_tokens eval.max_iters val_max_steps max_eval_samples"
        " eval_subset_num_batches limit_val_batches validation_steps",
        "evaluate.tasks_every": "core_metric_every",
        "log.sinks": "report_to logger loggers logger_name wandb wandb_log use_wandb enable_wandb tensorboard"
        " enable_tensorboard tensorboard_dir",
        "log.every": "log_interval logging_steps log_freq print_freq log_every_n_steps",
        "--out": "out_dir output_dir save_folder checkpoint.folder run_name logging_dir output out o model_tag"
        " save.path save.dir experiment_name job_name",
        "--nproc": "nproc nproc_per_node devices num_gpus gpus n_gpus num_processes ngpu world_size",
        "--explain": "verbose",
    }
)
# Where the number is another one.
CONVERSIONS = {
    "model.n_layer": (
        "depth",
        "nanochat's depth, from which all else follows, is the recipe depth-N",
    ),
    "model.d_ff": ("mlp_ratio expansion_ratio ffn_mult", "a width: the ratio x model.d_model"),
    "data.order": ("shuffle shuffle_data", "True is shuffled, False sequential"),
    "optim.lr": (
        "embedding_lr unembedding_lr scalar_lr",
        "AdamW has one rate, for all that muon leaves to it",
    ),
    "budget.tokens": (
        "max_duration target_param_data_ratio param_data_ratio",
        "batches are budget.steps, epochs budget.epochs, a ratio is multiplied by the parameters",
    ),
    "save.keep_best": (
        "always_save_checkpoint",
        "False is save.keep_best=true, True is save.every as long as evaluate.every",
    ),
    "optim.min_lr_ratio": ("min_lr", "it is a share of optim.lr"),
    "optim.warmup": ("warmup_ratio", "0.1 is written 0.1dur"),
    "optim.decay": (
        "cooldown_frac warmdown_ratio decay_ratio lr_decay_ratio lr_decay_iters",
        "0.4 is written 0.4dur; iterations count from the end of the warm-up",
    ),
    "optim.beta1": ("betas", "the second is optim.beta2"),
    "optim.schedule": ("decay_lr", "False is constant"),
    "model.bias": ("no_bias", "the opposite"),
    "budget.batch_tokens": (
        "batch_size global_batch_size train_batch_size global_train_batch_size batch",
        "it counts tokens: sequences x model.seq_len, of all processes and micro-batches",
    ),
    "machine.micro_batch": (
        "gradient_accumulation_steps grad_accum grad_accum_steps",
        "accumulation is what remains: budget.batch_tokens / (micro_batch x model.seq_len x processes)",
    ),
    "evaluate.tokens": (
        "eval_iters eval.max_iters val_max_steps max_eval_samples eval_subset_num_batches limit_val_batches"
        " validation_steps",
        "it counts tokens: batches x sequences x model.seq_len",
    ),
    "machine.precision": ("bf16 fp16 amp", "write machine.precision=bf16 or fp16"),
    "log.sinks": (
        "wandb wandb_log use_wandb enable_wandb tensorboard enable_tensorboard tensorboard_dir",
        "name them: wandb, tensorboard, trackio",
    ),
}
VALUES = {
    "machine.precision": _invert(
        {
            "fp32": "float32 float full 32 32-true single no",
            "bf16": "bfloat16 bf16-mixed bf16-true amp-bf16",
            "fp16": "float16 half 16 16-mixed 16-true amp amp-fp16",
        }
    ),
    "machine.sharding": _invert(
        {
            "none": "ddp no-shard 0 off false no",
            "zero1": "1 stage1",
            "zero2": "2 shard-grad-op",
            "zero3": "3 fsdp fsdp2 full-shard true",
            "hybrid": "hsdp hybrid-shard",
        }
    ),
    "machine.attention": _invert(
        {
            "flash": "sdpa flash-attention flash-attn torch true",
            "fa2": "flash-attention-2",
            "explicit": "eager math false",
        }
    ),
    "machine.compile": _invert(
        {
            "on": "default inductor max-autotune",
            "graphs": "reduce-overhead cudagraphs",
            "blocks": "regional",
        }
    ),
    "data.order": _invert({"shuffled": "shuffle random true", "sequential": "in-order false"}),
    "objective.name": _invert(
        {
            "pretrain": "lm clm causal-lm",
            "sft": "finetune instruct chat",
            "reward": "rm reward-model",
            "ppo": "rlhf",
        }
    ),
    "machine.activation_checkpointing": _invert(
        {"block": "full true on yes", "none": "off false no"}
    ),
    "model.pos_emb": _invert({"rotary": "rope", "learned": "absolute learned-absolute"}),
    "model.mlp": _invert(
        {
            "swiglu": "silu llamamlp swish",
            "gelu": "gelu-new gelu-tanh gelu-pytorch-tanh",
            "gelu-erf": "gelu-exact",
            "relu2": "relu-squared squared-relu relusquared",
        }
    ),
    "optim.name": _invert(
        {"adamw": "adam adamw-torch adamw-torch-fused decoupled-adamw adamw8bit adam8bit"}
    ),
    "optim.schedule": _invert(
        {
            "cosine": "cosine-with-warmup cosine-decay cosine-decay-with-warmup cosineannealinglr",
            "linear": "linear-decay-with-warmup linear-with-warmup",
            "wsd": "warmup-stable-decay trapezoidal trapezoid",
            "multi-step": "step multistep step-decay steplr multisteplr piecewise",
            "constant": "constant-with-warmup none off",
        }
    ),
}
RECIPES = PUBLISHED | _invert(
    {
        "gpt2-124m": "gpt2-small gpt-2 gpt2-117m gpt2-125m train_gpt2 124m d12 gpt_2",
        "gpt2-355m": "gpt2-345m 355m d24",
        "gpt2-774m": "gpt2-762m 774m d36",
        "gpt2-1558m": "gpt2-1.5b gpt2-1542m gpt2xl d48",
        "gpt3-1.3b": "gpt3-xl",
        "finetune": "finetune_shakespeare",
        "shakespeare": "shakespeare_char train_shakespeare_char tinyshakespeare",
        "quickstart": "default demo example",
    }
)
CHOICES = _invert(  # commands, and values of their options and arguments
    {
        "train": "pretrain finetune resume fit continue base_train mid_train chat_sft chat_rl finetune_full",
        "sample": "generate inference complete",
        "chat": "talk repl converse chat_cli",
        "serve": "server api deploy host chat_web",
        "eval": "evaluate validate test score base_eval base_loss chat_eval",
        "prepare": "tokenize preprocess data download tok_train",
        "export": "convert convert_to_hf save hf upload push gguf convert_from_litgpt",
        "describe": "info summary params flops count",
        "plan": "estimate cost price eta time budget",
        "dryrun": "dry-run dry_run memory",
        "sweep": "tune search hpo optuna grid",
        "sync": "wandb tensorboard trackio",
        "bench": "benchmark profile speed",
        "launch": "slurm torchrun k8s submit",
        "doctor": "env check diagnose",
        "plot": "curves draw",
        "consolidate": "merge unshard",
        "runs": "list ls status compare",
        "scaling": "scaling-law chinchilla",
        "slurm": "sbatch srun",
        "torchrun": "mpi mpirun torchelastic accelerate deepspeed",
        "seconds": "time wallclock wall_time hours",
        "steps": "iterations iters step",
        "k8s": "kubernetes kubectl helm gke eks",
        "skypilot": "sky aws gcp azure lambda runpod cloud",
        "hf": "huggingface transformers safetensors gguf",
        "llmc": "llm.c bin",
        "tinyshakespeare": "shakespeare shakespeare_char tiny_shakespeare",
        "fineweb": "fineweb10b fineweb-10b",
        "fineweb-edu": "edu_fineweb10b fineweb_edu fineweb-edu-10b edu-fineweb",
        "gpt2": "gpt-2 r50k_base tiktoken",
        "bytes": "byte char chars character",
        "bpe:N": "bpe sentencepiece",
        "fp32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "gemm": "matmul mm",
        "batch": "throughput",
    }
)
OPTIONS = {  # ours, by the words of others
    "--out": "name",
    "--tokens": "max_new_tokens max_tokens length num_tokens max_length",
    "--data": "tasks_data eval_data dataset_path text input file corpus",
    "--nodes": "nnodes num_nodes",
    "--n": "num_samples num_return_sequences",
    "--top-k": "topk",
    "--temperature": "temp",
    "PROMPT": "prompt start text input",
    "MODEL": "model checkpoint model_path ckpt out_dir checkpoint_dir pretrained model_name_or_path",
    "SOURCE": "source input files",
    "RECIPE": "config config_file",
    "--init": "init_from model_name_or_path checkpoint_dir from_pretrained load_path",
    "--to": "format sink sinks",
    "--dtype": "precision",
    "--precision": "dtype",
    "--tokenizer": "vocab_size vocab tokenizer_name encoding",
    "--workers": "num_proc num_workers threads processes",
    "--text-key": "column field text_column",
    "--shard-tokens": "shard_size",
    "--val-fraction": "val_split val_size test_size",
    "--tp": "tensor_parallel tensor_parallel_size tp_size",
    "--shard": "sharding zero zero_stage fsdp",
    "--trials": "runs n_trials num_trials count",
    "--jobs": "parallel workers n_jobs",
    "--seeds": "n repeats",
    "--repeats": "rounds steps",
    "--preset": "model recipe",
    "--limit": "num_examples max_examples",
    "--examples": "log_samples",
    "--price": "cost dollars",
    "--deadline": "time hours max_hours",
    "--serve": "port",
    "--flops": "predict compute",
    "--host": "address bind ip",
    "--api-key": "token key",
    "--parallel": "max_batch batch_size max_num_seqs",
    "--prompt": "message question",
    "--sbatch": "mem qos cpus_per_task job_name constraint reservation nodelist exclude exclusive",
    "--fewshot": "num_fewshot",
    "--time": "walltime time_limit",
    "--int8": "quantize load_in_8bit quantization 8bit",
    "--nproc": "gpus_per_node ntasks_per_node ntasks gres",
}
# What other tools have a word for, and megatoken does another way or not at all.
REMARKS = {
    word: remark
    for remark, words in {
        "the same command goes on with its run": "resume auto_resume autoresume resume_from_checkpoint"
        " init_from=resume resume_from_step resume_step",
        "nothing is sent unless log.sinks names where to": "report_to=none",
        "log.sinks=wandb sends the run, by its folder's name, to the project megatoken": "wandb_project wandb_run_name"
        " wandb_entity wandb_name wandb_group wandb_tags",
        "without --tasks it is printed, for --data or what the run held out": "ppl perplexity",
        "every value of the run has its panel": "y y_axis",
        "with --harness the model's own template is used; --no-template leaves it out": "apply_chat_template",
        "the model's folder has its tokenizer": "tokenizer tokenizer_name tokenizer_path",
        "shards are mapped into memory and read ahead, without workers": "num_workers dataloader_num_workers"
        " pin_memory dataloader_pin_memory prefetch_factor persistent_workers",
        "initial weights are GPT-2's (normal, 0.02; model.zero_init)": "init_std initializer_range init_method_std",
        "muon takes five steps of its iteration": "ns_steps newton_schulz_steps",
        "machine.tensor_parallel splits a model that trains, or give dryrun --tp; one process writes text": "tp tp_size"
        " tensor_parallel tensor_parallel_size tensor_model_parallel_size",
        "no pipeline, context or expert parallelism: machine.sharding and machine.tensor_parallel split a model"
        " (docs/scaling-up.md)": "pipeline_parallel_degree pipeline_parallel pipeline_model_parallel_size pp pp_size"
        " context_parallel_degree context_parallel_size cp cp_size expert_parallel_degree ep ep_size",
        "data-parallel processes are what remains: all processes / machine.tensor_parallel; machine.sharding=hybrid"
        " shards within a machine": "data_parallel_replicate_degree dp_replicate data_parallel_size dp dp_size",
        "no FP8: machine.precision is auto, fp32, bf16 or fp16": "fp8 float8 use_fp8",
        "weights of 4 bits are not here; sample has --int8": "load_in_4bit",
        "nothing is kept on the CPU: machine.sharding and machine.activation_checkpointing save memory"
        " (docs/scaling-up.md)": "cpu_offload enable_cpu_offload offload offload_optimizer",
        "no LoRA: every weight is trained": "lora lora_r lora_rank lora_alpha use_peft peft use_lora",
        "no mixture of experts": "num_experts n_experts n_expert moe num_local_experts",
        "it is model.d_model / model.n_head": "head_dim d_head kv_channels head_size",
        "the recipe depth-N takes width, rate and length from its layers": "aspect_ratio",
        "megatoken plan RECIPE --tokens chinchilla says the length for a model": "target_flops",
        "megatoken launch ENGINE RECIPE --nodes N writes the script for several machines": "num_nodes nnodes nodes",
        "megatoken eval RUN measures without training": "eval_only do_eval do_predict",
        "megatoken train trains": "do_train",
        "megatoken export RUN --to hf --out DIR writes the folder to upload": "push_to_hub hub_model_id",
        "megatoken bench parts --trace profiles a step": "profile profiling enable_profiling profiler",
        "it is NCCL between GPUs, gloo elsewhere": "backend ddp_backend dist_backend",
        "save.keep_best goes by the validation loss": "metric_for_best_model greater_is_better",
        "--temperature 0 takes the likeliest token": "greedy do_sample",
    }.items()
    for word in words.split()
}
# The field that a section's name alone stands for.
MAIN_FIELDS = {
    "model": "model.preset",
    "data": "data.path",
    "optim": "optim.name",
    "objective": "objective.name",
}
TEXTS = (
    ".txt",
    ".md",
    ".jsonl",
    ".parquet",
    ".gz",
    ".zst",
    ".json",
    ".csv",
)  # suffixes of what is no recipe
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".ckpt")
SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in FIELDS if "." in key))
_OURS = {
    key.rpartition(".")[2]: key for key in FIELDS
}  # of fields with one name the last, as `every`


def nearest(word: str, names: Collection[str], cutoff: float = ALIKE) -> str:
    """The name that is most like `word`, empty where none is alike."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), "")


def suggest_choice(word: str, choices: Collection[str]) -> str:
    """The command or value that a wrong one stands for or is like, empty where none is."""
    word = word.lower()
    known = CHOICES.get(word, "")
    begins = [choice for choice in choices if len(word) > 2 and choice.startswith(word)]
    return (
        known
        if known in choices
        else begins[0]
        if len(begins) == 1
        else nearest(word, choices, CHOICES_ALIKE)
    )


def nearest_option(name: str, options: Collection[str]) -> str:
    """The option whose words are all in `name` or the other way round, that begins like it, or is most like it."""
    names = {option.strip("-"): option for option in options if option.startswith("--")}
    name = name.replace("_", "-")
    words = {*name.split("-")}
    alike = [each for each in names if words <= {*each.split("-")} or {*each.split("-")} <= words]
    alike = alike or [each for each in names if len(each) > 2 and name.startswith(each)]
    return names.get(nearest(name, alike, 0.0) or nearest(name, names, KEYS_ALIKE), "")


def find_remark(name: str) -> str:
    """What REMARKS has for a setting or option, or for a part of its name as in profiling.enabled; empty for none."""
    return next(filter(None, map(REMARKS.get, name.split(".")[::-1])), "")


def suggest_option(words: Sequence[str], options: Collection[str], *, settings: bool) -> str:
    """What to write for the first of the words that a command does not know, empty where nothing is known or alike.

    options: of the command, `--like-this` or PLACEHOLDERS. settings: it takes section.field=value words.
    """
    word, equals, value = words[0].partition("=")
    ours = "did you mean --out? " if word == "-o" and "--out" in options else ""
    if re.fullmatch("-[a-z]", words[0]) and "--llmc" in options:
        return f"{ours}flags of llm.c are one word: --llmc {shlex.quote(shlex.join(words))}"
    if ours:
        return ours.strip()
    if not equals and not word.startswith("-"):
        word, _, value = word.partition(":")
    name = word.strip("-.:+ ").replace("-", "_").lower()
    value = value.strip()
    value = value or next((each.strip("=:") for each in words[1:3] if each not in ("=", ":")), "")
    value = "" if value.startswith("-") else value
    known = next(
        (ours for ours, others in OPTIONS.items() if ours in options and name in others.split()), ""
    )
    field, note = (
        find_key(name) if settings and (equals or word.startswith("-") or "." in word) else ("", "")
    )
    if field.startswith("--"):
        known, field = known or (field if field in options else ""), ""
    if known.isupper():
        return f"write {known} alone, without {word}"
    certain = _is_known(name)
    remark = REMARKS.get(f"{name}={value}", "") or (
        "" if known or (field and certain) else find_remark(name)
    )
    if remark:
        return remark
    option = known or nearest_option(name, options)
    if not field or (known and "." not in name and name not in KEYS) or (option and not certain):
        if option and word.startswith("-"):
            return f"did you mean {option}?"
        return "settings are section.field=value" if settings and not word.startswith("-") else ""
    value = find_value(FIELDS[field], value) or value if certain and not note else ""
    form = (
        ", without --"
        if word.startswith("-")
        else ""
        if equals and words[0] != f"{word}="
        else ", in one word"
    )
    return f"settings are section.field=value{form}: {field}={value if _fits(field, value) else '...'} {note}".strip()


def _is_known(name: str) -> bool:
    """Whether a setting's name is ours or another tool's, not one that is only like it."""
    return name in KEYS | MAIN_FIELDS or name.split(".")[-1] in KEYS | _OURS


def _fits(key: str, text: str) -> bool:
    """Whether a setting can have this value."""
    try:
        return bool(text) and parse_value(FIELDS[key], text) is not None
    except ValueError:
        return False


def find_key(key: str) -> tuple[str, str]:
    """(our setting, or option such as --out; a note where its value is another one) for an unknown one; empty for none.

    What another tool's word stands for, else what is alike: in its section, as a whole, by name.
    """
    key = key[:200].lower().replace("-", "_").replace("/", ".").strip(".")
    section, _, name = key.rpartition(".")
    near = nearest(name, _OURS, KEYS_ALIKE)
    in_section = f"{section}.{near}"
    found = (
        KEYS.get(key)
        or KEYS.get(name)
        or MAIN_FIELDS.get(key)
        or (in_section if in_section in FIELDS else "")
    )
    found = found or ("" if section in SECTIONS else nearest(key, FIELDS, KEYS_ALIKE))
    parts = key.split(".")[::-1]  # a name may have a part of ours below it, as betas.0
    found = found or next(filter(None, map((KEYS | _OURS).get, parts)), "") or _OURS.get(near, "")
    words, note = CONVERSIONS.get(found, ("", ""))
    return found, note if {key, *parts} & {*words.split()} else ""


def suggest_key(key: str, value: str = "") -> str:
    """What to write for an unknown setting, or what there is where nothing is known or alike."""
    found, note = find_key(key)
    name = key[:200].lower().replace("-", "_")
    if remark := REMARKS.get(f"{name}={value}", "") or (
        "" if _is_known(name.replace("/", ".")) else find_remark(name)
    ):
        return remark
    if found:
        return f"did you mean '{found}'?{f' {note}' if note else ''}"
    if "." in key and (near := nearest(key.partition(".")[0].lower(), SECTIONS)):
        return f"{near} has {', '.join(known.partition('.')[2] for known in FIELDS if known.startswith(f'{near}.'))}"
    return (
        f"settings are section.field, sections {', '.join(SECTIONS)}: see `megatoken train --help`"
    )


def find_value(spec: ConfigField, text: str) -> str:
    """The value that a wrong one stands for or is like, empty where none is."""
    word = text.strip().lower().replace("_", "-")
    truth = {"1": True, "0": False}.get(word) if spec.type is bool else TRUTHS.get(word)
    if truth is not None and spec.type is bool:
        return str(truth).lower()
    on_off = ("on" if truth else "off") if truth is not None and "on" in spec.choices else ""
    known = VALUES.get(spec.key, {}).get(word) or on_off
    return known or suggest_choice(word, spec.choices)


def suggest_value(spec: ConfigField, text: str) -> str:
    """Return what to write for a wrong value, empty if nothing is similar."""
    if value := find_value(spec, text):
        return f"did you mean {value}?"
    batches = re.fullmatch(r"(\d+) ?(ba|batch(?:es)?|it|iters?|iterations?)", text.strip())
    return f"did you mean {batches[1]}steps?" if spec.is_duration and batches else ""


def suggest_recipe(word: str, known: Sequence[str]) -> str:
    """What to write for an unknown recipe: another's name, those that begin like it, the nearest; what there is.

    A preset that is no recipe is an architecture for one.
    """
    path = PurePosixPath(word.lower())
    if path.suffix == ".py":
        return f"did you mean --nanogpt '{word}'? known: {', '.join(known)}"
    quoted = shlex.quote(word)
    if path.suffix in WEIGHTS:
        return f"a model goes on by: train finetune --init {quoted} data.path=DATA; recipes: {', '.join(known)}"
    if path.suffix in TEXTS:
        return f"text is trained on by: megatoken quickstart --data {quoted}; recipes: {', '.join(known)}"
    name = re.sub(r"\.ya?ml$", "", path.name)
    if deep := re.fullmatch(r"(?:d|depth)[-_]?(\d+)", name) if name not in RECIPES else None:
        return f"did you mean 'depth-{int(deep[1])}'? known: {', '.join(known)}"
    begin = [each for each in known if len(name) > 2 and each.startswith(name)]
    near = RECIPES.get(name, "") if RECIPES.get(name) in known else ""
    preset = name if name in PRESETS else nearest(name, PRESETS, 0.8)
    guess = near or "' or '".join(begin[:4]) or nearest(name, known, RECIPES_ALIKE)
    if preset and preset not in known and not near and not begin:
        return f"{preset} is a preset, not a recipe: RECIPE model.preset={preset}; recipes: {', '.join(known)}"
    return (
        f"did you mean '{guess}'? known: {', '.join(known)}"
        if guess
        else f"known: {', '.join(known)}"
    )
