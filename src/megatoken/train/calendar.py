"""When things are due: the recipe's durations in steps."""

from dataclasses import dataclass

from megatoken.config import Run
from megatoken.knobs import Duration
from megatoken.train.state import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """When things are due, in steps between them; 0: never."""

    log: int
    evaluate: int
    tasks: int
    sample: int
    save: int
    keep: int

    @classmethod
    def of(cls, run: Run, plan: Plan) -> "Calendar":
        def steps(length: Duration) -> int:
            return plan.steps(length)

        return cls(
            log=steps(run.log.every),
            evaluate=steps(run.evaluate.every),
            tasks=steps(run.evaluate.tasks_every) if run.evaluate.tasks else 0,
            sample=steps(run.sample.every),
            save=steps(run.save.every),
            keep=steps(run.save.keep_every),
        )


def is_due(every: int, step: int) -> bool:
    """Whether something scheduled `every` so many steps (0: never) falls on `step`."""
    return every > 0 and step % every == 0
