"""Real text: the pages of docs/, and prompts of unequal length."""

from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"

# Six requests as people send them, from six words to three hundred.
PROMPTS: Final = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Name three fruits and say of each what it tastes like. Answer with a numbered list.",
    "Explain to a child of six years why the sky is blue in the day and dark at night, in a few short sentences.",
    "Here is a note: 'The meeting is moved from Monday to Thursday at ten. Anna brings the figures, Ben the coffee, "
    "and Carla asks the customers for their opinion. We meet in the small room, because the large one is painted.' "
    "Who brings the coffee, and where do we meet?",
)  # fmt: skip


def page(name: str, characters: int | None = None) -> str:
    return (DOCS / f"{name}.md").read_text()[:characters]


def prompts() -> list[str]:
    return [*PROMPTS, f"Summarize this in one sentence:\n\n{page('memory', 1200)}"]
