"""The settings of task scores and samples during training (settings.toml)."""

from dataclasses import dataclass

from megatoken.base.config.fields import Duration


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """How often to measure multiple-choice scores, and on what."""

    tasks: str = ""
    tasks_every: Duration = Duration(0)
    tasks_data: str = ""
    tasks_limit: int = 0

    @property
    def task_names(self) -> list[str]:
        """The names of the tasks; `?` at the end of one means that its examples may be missing."""
        return [name.strip() for name in self.tasks.split(",")] if self.tasks else []


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text generated during training."""

    every: Duration = Duration(0)
    at_start: bool = False
    prompt: str = ""
    tokens: int = 64
    temperature: float = 1.0
    top_k: int = 50
    num_samples: int = 1
