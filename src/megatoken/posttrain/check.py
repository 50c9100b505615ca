"""Find conflicts between the settings of an objective and others."""

from megatoken.base.config.schema import Config
from megatoken.base.config.validate import Conflicts
from megatoken.posttrain.settings import OBJECTIVES, SAMPLING, ObjectiveConfig


def check_objective(config: Config) -> Conflicts:
    """Yield each conflict as (setting, problem, how to fix it)."""
    name, save, has_head = config.objective.name, config.save, config.model.value_head
    settings = config.section(ObjectiveConfig)
    if has_head != (name in ("reward", "ppo")):
        problem = f"objective {name} {'has no' if has_head else 'needs a'} value head"
        yield "model.value_head", problem, f"set model.value_head={str(not has_head).lower()}"
    if name not in OBJECTIVES:
        return
    if config.data.order in ("sequential", "spans"):
        yield "data.order", "conversations are always shuffled", "set data.order=shuffled"
    if config.machine.tensor_parallel > 1:
        problem = "not supported for conversations"
        yield "machine.tensor_parallel", problem, "use machine.sharding"
    if name == "grpo" and settings.group < 2:
        yield "objective.group", "grpo compares the answers of a group", "use at least 2, or ppo"
    is_split = config.model.is_unread or config.batch_seqs % settings.group == 0
    if name in SAMPLING and not is_split:
        problem = f"{settings.group} does not divide the batch of {config.batch_seqs} answers"
        yield "objective.group", problem, "change it or budget.batch_tokens"
    intervals = {"save.every": save.every}
    if save.keep_best:
        intervals["evaluate.every"] = config.evaluate.every
    updates = settings.updates if name in SAMPLING else 1
    for key, every in intervals.items():  # because a resume samples again from the saved weights
        if every.value and updates > 1 and (every.unit != "steps" or every.value % updates):
            problem = f"{every} would save between the {updates} updates on the same answers"
            yield key, problem, f"use a multiple of objective.updates, such as {updates}steps"
