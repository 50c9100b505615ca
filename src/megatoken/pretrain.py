"""The program: read it first. Everything happens here in the order of time, and only here do all stages meet.

In: a checked recipe and a run folder. Out: the run folder, filled (docs/run-folder.md draws it), and a summary.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatoken import opening
from megatoken.checkpoint.save import Save
from megatoken.checkpoint.store import prune
from megatoken.config import Run
from megatoken.console import Console, format_duration, format_step
from megatoken.data.dataset import Dataset
from megatoken.data.loader import EvaluationWindows, Loader, Prefetcher, evaluation_windows
from megatoken.data.tokenizer import Tokenizer
from megatoken.device import Device, open_device, with_peak
from megatoken.errors import Exit, Fault
from megatoken.evaluate.choice import Question, answer_questions, describe_grades, grade, read_exams
from megatoken.evaluate.loss import held_out_loss
from megatoken.knobs import parse_time
from megatoken.parallel.layout import fit_machine
from megatoken.parallel.ranks import Ranks, join, naming_the_lost
from megatoken.parallel.shard import agree_on_layout
from megatoken.parallel.topology import Topology, read_topology
from megatoken.plot import draw_run
from megatoken.recipe import Resolved
from megatoken.sample import generate
from megatoken.train.calendar import Calendar, is_due
from megatoken.train.guard import Guard
from megatoken.train.journal import Journal, read_metrics
from megatoken.train.meter import Meter
from megatoken.train.state import Plan, State, build_plan, whole_model
from megatoken.train.step import Flight, Report, land, launch_step

LOOK_SECONDS = 1.0  # between looks at an accelerator's numbers: each makes it run dry for a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended. code: DONE or STOPPED; losses in nats, None where nothing was measured."""

    code: Exit
    run: str
    steps: int
    tokens: int
    loss: float | None
    val_loss: float | None
    seconds: float
    reason: str


def pretrain(resolved: Resolved, out: Path, console: Console, *, explain: bool = False) -> Summary:
    """Train `resolved` in the run folder `out`, going on from its newest whole checkpoint if there is one.

    explain: say what was measured for every automatic choice. Raises Fault, with the exit code of its kind, when the
    run cannot be begun or gone on with; whatever was committed before stays.
    """
    topology, machine = read_topology(), resolved.run.machine
    device = open_device(machine, rank=topology.local_rank, ranks=topology.local_world_size)
    with join(topology, device.place.type) as ranks:  # before anything else can fail: who leaves is missed at once
        return pretrain_together(resolved, out, console, device, ranks, explain)


def pretrain_together(
    resolved: Resolved, out: Path, console: Console, device: Device, ranks: Ranks, explain: bool
) -> Summary:
    """`pretrain` on one rank of several."""
    began = time.monotonic()
    run, topology, first = resolved.run, ranks.topology, ranks.topology.is_first
    if first:
        opening.check_folder(out, run)
    else:
        console = Console(quiet=True)
    dataset, tokenizer = opening.open_data(run)
    shape = run.model.shape(tokenizer.vocab_size)
    exams = read_exams(run.evaluate, tokenizer, shape.seq_len)
    loader = opening.open_loader(run, dataset, shape, topology)
    with (
        Journal.open(out) if first else Journal.silent(out) as journal,
        Guard(parse_time(run.save.time_limit) or None) as guard,
    ):
        layout = agree_on_layout(run.machine, shape, device, ranks)
        run = replace(run, machine=fit_machine(run.machine, layout))
        if first:
            opening.check_space(out, shape)
            device = with_peak(device)
        opening.introduce(console, resolved, out, device, dataset, tokenizer, loader, shape, layout)
        state = opening.build(run, shape, tokenizer, device, out, console, layout, ranks)
        opening.restore(out, state, dataset, journal, console, ranks)
        plan = build_plan(run, epoch_tokens=loader.n_windows * shape.seq_len, kind=device.place.type)
        if ranks.agree(opening.is_finished(out, state, plan)):
            console.say(f"this run is finished; nothing to do: {out}")
            return summarize(out, plan, Exit.DONE, state.step, time.monotonic() - began)
        if first:
            opening.record_start(out, resolved, tokenizer, journal, device, topology)
        opening.choose_kernels(out, run, state, plan, device, console, ranks, explain=explain)
        plan = plan.with_micro_batch(opening.choose_micro_batch(out, run, state, plan, device, console))
        opening.compile_model(run, state, plan, device, console)
        state.share(ranks)
        journey = Journey(
            run=run,
            out=out,
            console=console,
            device=device,
            dataset=dataset,
            tokenizer=tokenizer,
            exams=exams,
            journal=journal,
            guard=guard,
            state=state,
            plan=plan,
            seen={(kind, step) for kind, step in ranks.agree(opening.list_seen(out) if first else None)},
        )
        code = journey.complete(loader)
    return summarize(out, plan, code, state.step, time.monotonic() - began, guard.stop_requested)


def summarize(out: Path, plan: Plan, code: Exit, step: int, seconds: float, reason: str = "") -> Summary:
    """How a run ended, its losses as the journal tells them."""
    last = {row["kind"]: row.get("loss") for row in read_metrics(out)}
    return Summary(
        code=code,
        run=str(out),
        steps=step,
        tokens=step * plan.batch_tokens,
        loss=last.get("train"),
        val_loss=last.get("val"),
        seconds=seconds,
        reason=reason,
    )


@dataclass(slots=True, kw_only=True)
class Journey:
    """The run under way: the loop, and what is done on schedule between steps."""

    run: Run
    out: Path
    console: Console
    device: Device
    dataset: Dataset
    tokenizer: Tokenizer
    exams: dict[str, list[Question]]  # by task
    journal: Journal
    guard: Guard
    state: State
    plan: Plan
    meter: Meter = field(init=False)
    calendar: Calendar = field(init=False)
    seen: set[tuple[str, int]]  # (kind, step) of what the journal already tells: a resume repeats nothing
    windows: EvaluationWindows | None = field(default=None)
    flights: list[Flight] = field(default_factory=list)  # steps that were launched and not looked at yet
    saving: Save | None = None  # a checkpoint on its way

    def __post_init__(self) -> None:
        self.calendar = Calendar.of(self.run, self.plan)
        self.meter = Meter(
            device=self.device,
            shape=self.state.model.shape,
            batch_tokens=self.plan.batch_tokens,
            total_steps=self.plan.total_steps,
            world_size=self.state.ranks.topology.world_size,
        )

    def complete(self, loader: Loader) -> Exit:
        """Travel, and tell how it ended, also when that is not well."""
        try:
            with naming_the_lost(self.state.ranks.topology):  # split models talk in every forward and backward
                code = self.travel(loader)
        except Exception as failure:
            number = int(failure.code) if isinstance(failure, Fault) else 1
            self.journal.write("event", self.state.step, self.tokens, what="failed", message=str(failure))
            self.journal.status(state="failed", exit_code=number, step=self.state.step, message=str(failure))
            raise
        finally:
            self.console.close()
        if self.state.ranks.topology.is_first:
            self.finish(code)
        return code

    @property
    def tokens(self) -> int:
        """Training tokens used so far."""
        return self.state.step * self.plan.batch_tokens

    def travel(self, loader: Loader) -> Exit:
        """Step to the end of the budget, or until asked to stop; either way everything is saved on return."""
        if len(self.dataset.val) and self.run.evaluate.tokens:
            limit = self.run.evaluate.tokens
            self.windows = evaluation_windows(self.dataset.val, seq_len=loader.seq_len, limit_tokens=limit)
        with closing(Prefetcher(loader, self.device.place)) as batches:
            while self.state.step < self.plan.total_steps:
                if self.state.ranks.any(bool(self.guard.stop_requested)):
                    self.look()
                    self.save()
                    self.finish_save()
                    return Exit.STOPPED
                self.keep_calendar()
                if not self.flights:
                    self.meter.start()
                self.flights.append(self.take_step(batches))
                if self.device.place.type == "cpu" or self.meter.waited_seconds > LOOK_SECONDS:
                    self.look()
        self.look()
        self.evaluate()
        self.examine()
        if self.calendar.sample:
            self.sample()
        self.save()
        self.finish_save()
        return Exit.DONE

    def keep_calendar(self) -> None:
        """Evaluate, sample and save if they are due at this step and not done yet."""
        step = self.state.step
        due = self.calendar
        if any(is_due(every, step) for every in (due.evaluate, due.tasks, due.sample, due.save)):
            self.look()
        if is_due(self.calendar.evaluate, step):
            self.evaluate()
        if is_due(self.calendar.tasks, step):
            self.examine()
        if is_due(self.calendar.sample, step) and step:
            self.sample()
        try:
            if is_due(self.calendar.save, step) and step:
                self.save()
            elif self.saving is not None and self.saving.is_written():
                self.finish_save()
        except Fault as fault:
            # Earlier checkpoints are whole, and later saves may find room again: training goes on.
            self.console.warn(f"checkpoint not saved: {fault}")
            self.write("event", what="save failed", message=str(fault))

    def take_step(self, batches: Prefetcher) -> Flight:
        """Launch an optimizer step on the next batch."""
        try:
            return launch_step(self.state, self.plan, self.device, *batches.get(self.state.step))
        except torch.OutOfMemoryError:
            fix = f"set machine.micro_batch below {self.plan.micro_batch}"
            raise Fault(Exit.CONFIG, "out of memory", f"step {self.state.step} on {self.device.place}", fix) from None

    def look(self) -> None:
        """Wait for the steps that were launched; write and show them."""
        if not self.flights:
            return
        reports = land(self.state, self.flights)
        self.flights.clear()
        pace = self.meter.read(len(reports))
        for report in reports:
            self.record(report, pace)
        self.guard.observe((pace["seconds"] or 0.0) * len(reports))

    def record(self, report: Report, pace: dict[str, float | None]) -> None:
        """Write and show a step."""
        row = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, **pace}
        last = report.step == self.plan.total_steps
        if is_due(self.calendar.log, report.step) or last:
            self.journal.write("train", report.step, report.step * self.plan.batch_tokens, **row)
            self.seen.add(("train", report.step))
        if report.skipped:
            self.write("event", what="step skipped", message="fp16 gradients overflowed; loss scale lowered")
        line = format_step(
            {"step": report.step, **row},
            total_steps=self.plan.total_steps,
            memory_bytes=self.device.peak_memory_bytes(),
            remaining_seconds=self.meter.remaining_seconds(report.step),
        )
        self.console.step(line, last=last)

    def write(self, kind: str, **values: object) -> None:
        """Add a row at this step to the journal."""
        self.journal.write(kind, self.state.step, self.tokens, **values)
        self.seen.add((kind, self.state.step))

    def evaluate(self) -> None:
        """Measure the held-out loss, unless there is nothing held out or it is measured already."""
        if self.windows is None or ("val", self.state.step) in self.seen:
            return
        size, layout = self.plan.micro_batch, self.state.layout
        # Windows of a forward are the same for any number of readers, which take them in turn, each as often.
        turns = range(layout.reader * size, len(self.windows) + layout.reader * size, layout.readers * size)
        rows = (self.windows.rows(first, size) for first in turns)
        held = held_out_loss(
            self.state.model,
            rows,
            self.device,
            chunk=self.plan.loss_chunk,
            ranks=self.state.ranks,
            byte_lengths=self.tokenizer.byte_lengths,
            layout=layout,
        )
        self.write("val", loss=held.loss, target_tokens=held.targets, bits_per_byte=held.bits_per_byte)
        self.console.say(f"step {self.state.step}: validation loss {held.loss:.4f} over {held.targets:,} tokens")

    def examine(self) -> None:
        """Score the tasks, unless that is done already; where layers are split, on the first rank, with whole ones."""
        if ("eval", self.state.step) in self.seen or not self.exams:
            return
        split = self.state.layout.tensor > 1
        model, ranks = (whole_model(self.state), Ranks(Topology())) if split else (self.state.model, self.state.ranks)
        self.seen.add(("eval", self.state.step))
        if model is None:
            return
        for task, questions in self.exams.items():
            grades = grade(answer_questions(model, questions, self.device, ranks))
            self.write("eval", task=task, **grades)
            self.console.say(f"step {self.state.step}: {task} {describe_grades(grades)}")

    def sample(self) -> None:
        """Let the model write, and keep what it wrote; where the model is split, all ranks bring their part."""
        if ("sample", self.state.step) in self.seen:
            return
        model = whole_model(self.state)
        self.seen.add(("sample", self.state.step))
        if model is None:
            return
        asked = self.run.sample
        prompt = self.tokenizer.encode(asked.prompt).tolist() or [self.tokenizer.eot]
        room = model.shape.seq_len - len(prompt)
        drawn = generate(
            model,
            prompt,
            tokens=min(asked.tokens, room),
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=self.run.seed,
            n=asked.n,
            stop_id=self.tokenizer.eot,
            device=self.device,
        )
        texts = [asked.prompt + self.tokenizer.decode(ids) for ids in drawn]
        rule = "\n" + "-" * 40 + "\n"
        file = self.out / "samples" / f"step-{self.state.step:08d}.txt"
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text(rule.join(texts) + "\n", encoding="utf-8")
        except OSError as wrong:  # a sample is not worth a run
            self.console.warn(f"sample not kept: {wrong.strerror} — {file}")
        self.write("sample", text=texts)
        self.console.say(f"step {self.state.step}: sample\n{rule.join(texts)}\n")

    def save(self) -> None:
        """Begin a checkpoint of this step, after the one on its way."""
        if ("save", self.state.step) in self.seen:
            return
        self.finish_save()
        self.seen.add(("save", self.state.step))
        meta = {"dataset": self.dataset.fingerprint, "tokenizer": self.tokenizer.fingerprint}
        config, tokenizer = self.out / opening.CONFIG, self.out / opening.TOKENIZER
        self.journal.sync()  # a checkpoint counts on the rows before it
        self.saving = Save(self.out / opening.CHECKPOINTS, self.state, config=config, tokenizer=tokenizer, meta=meta)

    def finish_save(self) -> None:
        """Commit the checkpoint that is on its way, if there is one, then prune old ones."""
        saving, self.saving = self.saving, None
        if saving is None:
            return
        folder = saving.finish()
        seconds = {"seconds": saving.writing_seconds, "stall_seconds": saving.stall_seconds}
        self.guard.observe(save_seconds=sum(seconds.values()))
        tokens = saving.step * self.plan.batch_tokens
        self.journal.write("save", saving.step, tokens, checkpoint=folder.name, **seconds)
        if not self.state.ranks.topology.is_first:
            return
        try:
            prune(folder.parent, keep_last=self.run.save.keep_last, keep_every=self.calendar.keep)
        except Fault as fault:
            self.write("event", what="old checkpoints not removed", message=str(fault))

    def finish(self, code: Exit) -> None:
        """Tell how it ended, draw the curves, say what to type next."""
        done = code == Exit.DONE
        reason = "" if done else self.guard.stop_requested or "another rank"
        self.journal.status(
            state="done" if done else "stopped", exit_code=int(code), step=self.state.step, message=reason
        )
        if not done:
            left = format_duration(self.meter.remaining_seconds(self.state.step))
            self.console.say(
                f"stopped by {reason} at step {self.state.step}, all saved; the same command goes on ({left} left)"
            )
            return
        if self.run.log.plots:
            self.console.say(draw_run(self.out, pictures=self.run.log.pictures))
        self.console.say(f'done: {self.out}; next: megatoken sample {self.out} "your prompt"')
