"""Sequences as drafters see them."""

from dataclasses import dataclass, field

from worker.speculation.draft_state import DraftState


@dataclass(eq=False)
class Drafted:
    """A sequence of nothing but its drafts; `name` is for tests."""

    name: int = 0
    draft: DraftState = field(default_factory=DraftState)
