"""Open a run's source of training batches, and the validation that goes with its objective."""

from collections.abc import Callable
from typing import Any

from megatoken.data.dataloader import Prefetcher
from megatoken.posttrain.answer_scores import AnswerScorer
from megatoken.posttrain.batch_source import open_row_batches
from megatoken.posttrain.batches import BatchSource, Learner, Poll
from megatoken.posttrain.rewards import Reward
from megatoken.train.run import RunLog, RunPlan
from megatoken.train.state import TrainState

Validation = Callable[[Poll], dict[str, Any]]


def open_batches(
    plan: RunPlan, state: TrainState, log: RunLog, reward: str | Reward | None
) -> tuple[BatchSource, Validation | None]:
    """Return the source of training batches and the validation function.

    The function is None for objectives validated by the loss on held-out text. Depending on the
    objective, batches hold windows of text, preference pairs or sampled answers. Call this only
    after `state` has been restored from a checkpoint.
    """
    device = plan.device
    steps = plan.step_config
    if plan.data.loader is not None:
        return Prefetcher(plan.data.loader, device.torch_device), None
    learner = Learner(
        config=plan.config,
        out=plan.out,
        dataset=plan.data.dataset,
        policy=state,
        device=device,
        scorer=AnswerScorer(
            device=device,
            micro_batch=steps.micro_batch,
            loss_chunk=steps.loss_chunk,
            fits=not steps.deterministic,
        ),
        console=plan.console,
        log_event=log.event,
    )
    batches = open_row_batches(learner, steps.loss, reward)
    return batches, batches.validate
