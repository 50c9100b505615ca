"""Find unknown names in evaluate.tasks."""

from megatoken.base.config.schema import Config
from megatoken.base.config.validate import Conflicts
from megatoken.inference.settings import TasksConfig
from megatoken.inference.tasks import find_tasks


def check_tasks(config: Config) -> Conflicts:
    """Return no conflicts. Raises ConfigError for an unknown task."""
    find_tasks([name.removesuffix("?") for name in config.section(TasksConfig).task_names])
    return iter(())
