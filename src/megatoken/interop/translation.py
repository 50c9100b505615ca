"""Another program's way of saying what to train, told as a recipe of ours.

A translator (llmc, nanogpt, composer) turns its program's words into assignments, each with the words it came from, and
notes about what cannot be the same. It reads values and never runs anything. Absent: torch, and defaults of our own: a
translated recipe says everything that its source says or implies.
"""

from dataclasses import dataclass, field
from pathlib import Path

from megatoken.recipe import Assignment, Resolved, resolve_assignments


@dataclass(slots=True)
class Translation:
    """A recipe in the making. name: of the recipe; out: the run folder its source names, if any."""

    name: str
    out: Path | None = None
    assignments: list[Assignment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: object, where: str) -> None:
        """Give `key` a value, as it would be written in a recipe. where: the foreign words it stands for."""
        self.assignments.append(Assignment(key, str(value), where))

    def note(self, text: str) -> None:
        """Tell, once, what differs from the source."""
        if text not in self.notes:
            self.notes.append(text)

    def resolve(self, overrides: list[str]) -> Resolved:
        """The checked recipe. Raises Fault(CONFIG) naming the foreign words whose value is wrong."""
        return resolve_assignments(self.name, self.assignments, overrides)


def write_number(value: float) -> str:
    """A number as it is read back exactly, without the `.0` of whole ones."""
    return str(int(value)) if value == int(value) else repr(value)
