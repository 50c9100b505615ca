"""Score tasks and generate samples between the steps of a training run."""

from collections.abc import Mapping
from functools import partial

from megatoken.base.config.schema import Config
from megatoken.base.errors import ConfigError, NumericsError
from megatoken.base.redact import redact
from megatoken.base.system.device import is_out_of_memory
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.inference.generate import generate_ids
from megatoken.inference.multiple_choice import (
    EncodedExample,
    compute_metrics,
    format_metrics,
    read_tasks,
    score_examples,
)
from megatoken.inference.sampling import Sampling
from megatoken.inference.settings import SampleConfig, TasksConfig
from megatoken.model.kernels.attention import supports_mask
from megatoken.text.chat_template import Message, find_stop_ids, find_template
from megatoken.text.tokenizer import open_tokenizer
from megatoken.train.actions import Action
from megatoken.train.objective import Poll
from megatoken.train.run import Run, RunContext, RunData
from megatoken.train.state import gather_model

RULE = "\n" + "-" * 40 + "\n"  # between samples
DEFAULT_QUESTION = "Hello."  # for chat samples if sample.prompt is empty

Tasks = Mapping[str, list[EncodedExample]]


def open_tasks(config: Config, data: RunData, context: RunContext) -> Action | None:
    """Return the action that scores `evaluate.tasks`; None without tasks.

    Raises what `read_tasks` raises, and ConfigError if the attention has no mask.
    """
    tokenizer = open_tokenizer(data.vocabulary)
    seq_len = data.model_config.seq_len
    settings = config.section(TasksConfig)
    tasks = read_tasks(settings, tokenizer, seq_len, context.console.warn)
    for names in context.comm.gather(list(tasks)):  # a machine may lack files that others have
        tasks = {task: examples for task, examples in tasks.items() if task in names}
    if not tasks:
        return None
    _require_mask(config)
    return Action(settings.tasks_every, partial(score_tasks, tasks))


def open_sample(config: Config, data: RunData, context: RunContext) -> Action | None:
    """Return the action that samples every `sample.every`; None if that is 0.

    Raises ConfigError if the prompt exceeds the context or the attention has no cache.
    """
    settings, seq_len = config.section(SampleConfig), data.model_config.seq_len
    if not settings.every.value:
        return None
    n_tokens = len(open_tokenizer(data.vocabulary).encode(settings.prompt))
    if n_tokens > seq_len:
        what = f"sample.prompt has {n_tokens} tokens, the model's context is {seq_len}"
        raise ConfigError(what, "sample.prompt", "shorten it, or set sample.every=0")
    _require_mask(config)
    return Action(settings.every, sample, at_start=settings.at_start)


def _require_mask(config: Config) -> None:
    attention = config.machine.attention
    if attention != "auto" and not supports_mask(attention):
        what = f"attention {attention!r} has no mask or cache, which sampling and tasks need"
        fix = "set sample.every=0 and evaluate.tasks=''"
        raise ConfigError(what, "machine.attention", fix)


def score_tasks(tasks: Tasks, run: Run, poll: Poll) -> None:
    """Score the model on each multiple-choice task whose score for this step is not logged yet.

    A tensor-parallel model is gathered on rank 0, which scores it while the other ranks wait.

    poll: called on all ranks before each task. Unless the model is tensor-parallel, it is also
    called before each batch of a task.
    """
    state = run.state
    logged = run.history.logged
    names = [task for task in tasks if (task, state.step) not in logged]
    if not names:
        return
    run.begin("tasks")
    is_gathered = state.dims.tp_size > 1
    model = gather_model(state) if is_gathered else state.model
    comm = Comm(DistEnv()) if is_gathered else run.comm
    for task in names:
        poll()
        logged.add((task, state.step))
        if model is None:
            continue
        on_batch = None if is_gathered else poll
        scores = score_examples(model, tasks[task], run.device, comm, on_batch)
        metrics = compute_metrics(scores)
        run.write("eval", task=task, **metrics)
        run.console.print(f"step {state.step:,}: {task} {format_metrics(metrics)}")


def sample(run: Run, poll: Poll) -> None:
    """Generate text on rank 0, print it, and save it in RUN/samples.

    The model continues `sample.prompt` or, if the objective is to chat, answers it as a message. A
    sharded model is first gathered on rank 0.
    """
    step = run.state.step
    if ("sample", step) in run.history.logged:
        return
    run.begin("sample")
    model = gather_model(run.state, run.device.dtype)
    run.history.logged.add(("sample", step))
    if model is None:
        return
    config = run.config.section(SampleConfig)
    tokenizer = open_tokenizer(run.data.vocabulary)
    if not run.data.is_chat:
        prompt_ids = tokenizer.encode(config.prompt).tolist()
        ids = tokenizer.start_ids(prompt_ids)
        shown_prompt = config.prompt
    else:
        question = config.prompt or DEFAULT_QUESTION
        template = find_template(tokenizer)
        ids = prompt_ids = template.encode([Message("user", question)], reply=True)[0]
        shown_prompt = f"user: {question}\nassistant: "
    try:
        sequences = generate_ids(
            model,
            ids,
            Sampling(
                config.tokens,
                config.temperature,
                config.top_k,
                seed=run.config.seed,
                stop_ids=find_stop_ids(tokenizer),
            ),
            num_samples=config.num_samples,
            device=run.device,
        )
    except NumericsError as error:  # on rank 0 only; bad steps raise on all ranks
        run.console.warn(f"no sample: {error}")
        return
    except (RuntimeError, MemoryError) as error:  # a sample must not end a run
        if not is_out_of_memory(error):
            raise
        run.console.warn("no sample: out of memory; lower sample.num_samples or sample.tokens")
        return
    texts = [redact(shown_prompt) + tokenizer.decode_after(prompt_ids, s) for s in sequences]
    file = run.out / "samples" / f"step-{step:08d}.txt"
    try:
        file.parent.mkdir(exist_ok=True)
        file.write_text(RULE.join(texts) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        run.console.warn(f"sample not saved: {error.strerror} — {file}")
    run.write("sample", text=texts)
    run.console.fence(f"step {step:,}: sample", texts)
