"""Generator of training data: mixes conversations of every skill, with system prompts like those that clients send."""

from collections.abc import Callable
from typing import Any, Final

from . import facts, json_tasks, multi_turn, smalltalk, tools, transforms
from .files import phrasings
from .samples import Sample, Turn
from .words import Source

SEED: Final = 20261120
# Name of each category in measurements, its skills, and its weight in the training data.
TURN_SKILLS: Final[tuple[tuple[str, Any, float], ...]] = (
    ("small talk", smalltalk.SKILLS, 14.0),
    ("facts", facts.SKILLS, 40.0),
    ("transforms", transforms.SKILLS, 36.0),
    ("json", json_tasks.SKILLS, 11.0),
)
SAMPLE_SKILLS: Final[tuple[tuple[str, Callable[[Source], Sample], float], ...]] = (
    ("tool call", tools.one_call, 24.0),
    ("two tool calls", tools.two_calls, 11.0),
    ("no tool call", tools.no_call, 7.0),
    ("tool results", tools.answered, 9.0),
    ("multi-turn", multi_turn.recall, 12.0),
    ("multi-turn", multi_turn.not_told, 0.7),
    ("multi-turn", multi_turn.previous, 2.5),
)
CATEGORIES: Final = (
    "small talk",
    "facts",
    "transforms",
    "tool call",
    "two tool calls",
    "no tool call",
    "tool results",
    "json",
    "multi-turn",
    "thinking",
)

_SHORT_SYSTEMS: Final = phrasings("generate", "short_systems")
_RULES: Final = phrasings("generate", "rules")

# Replies of other assistants, for conversation histories that the demo model did not write.
_REPLIES: Final = phrasings("generate", "replies")


def _rule(src: Source) -> str:
    return src.pick(_RULES).format(
        a=src.word(),
        b=src.word(),
        n=src.noun(),
        m=src.noun(),
        c=src.city(),
        p=src.name(),
        d=src.date(),
        w=src.coined(),
        k=src.integer(1, 40),
    )


def system_prompt(src: Source, sentences: int) -> str:
    """Return a long system prompt like those of agents: headings, rules, prose."""
    parts = [src.pick(_SHORT_SYSTEMS)]
    style = src.integer(0, 2)
    for index in range(sentences):
        text = _rule(src) if src.chance(0.6) else src.sentence()
        if style == 0:
            parts.append(text)
        elif style == 1:
            parts.append(f"\n- {text}")
        else:
            parts.append((f"\n\n# {src.word().capitalize()}\n" if index % 6 == 0 else "\n") + text)
    return (" " if style == 0 else "").join(parts)


def single(src: Source, category: str, skills: Any) -> Sample:
    """Return one turn of a skill, sometimes after turns of other skills."""
    skill = src.weighted(skills)
    turn: Turn = skill(src)
    messages: list[dict[str, Any]] = []
    if src.chance(0.3) and not src.held_out:
        for _ in range(src.integer(1, 3)):
            before: Turn = src.weighted(
                [(s, w) for _, group, share in TURN_SKILLS for s, w in [(g, v * share) for g, v in group]]
            )(src)
            messages += _exchange(before)
    messages += _exchange(turn)
    return Sample(category, messages, turn.check, turn.keys, skill=skill.__name__)


def _exchange(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": turn.user},
        {"role": "assistant", "content": turn.answer, "reasoning_content": turn.thought},
    ]


def document(src: Source, sample: Sample, sentences: int) -> None:
    """Put a long document before the sample's last request."""
    user = next(m for m in reversed(sample.messages) if m["role"] == "user")
    filler = src.paragraph(sentences)
    user["content"] = (
        f"{filler}\n\n{user['content']}"
        if src.chance(0.6)
        else f"Here is a document.\n\n{filler}\n\nNow ignore the document. {user['content']}"
    )


def needle(src: Source, sentences: int) -> Sample:
    """Return a question about one sentence of a long document."""
    lines = [src.sentence() for _ in range(sentences)]
    what, value = (
        f"{src.word()} {src.pick(('code', 'number', 'key', 'password'))}",
        src.pick((src.code(), str(src.number()), src.coined())),
    )
    lines.insert(src.integer(0, len(lines)), f"The {what} is {value}.")
    text = " ".join(lines)
    question = src.ask(phrasings("generate", "needle"), w=what)
    answer = {
        "role": "assistant",
        "content": f"The {what} is {value}.",
        "reasoning_content": f"The text says the {what} is {value}.",
    }
    if src.chance(0.3):
        return Sample(
            "multi-turn",
            [{"role": "system", "content": text}, {"role": "user", "content": question}, answer],
            "contains",
            (value,),
            skill="needle",
        )
    user = f"{text}\n\n{question}" if src.chance(0.7) else f"{question}\n\n{text}"
    return Sample("multi-turn", [{"role": "user", "content": user}, answer], "contains", (value,), skill="needle")


def sample_of(src: Source, category: str) -> Sample:
    for name, skills, _ in TURN_SKILLS:
        if name == category:
            return single(src, name, skills)
    if category == "thinking":
        return make(src, thinking=True)
    makers = [(maker, share) for name, maker, share in SAMPLE_SKILLS if name == category]
    maker = src.weighted(makers)
    sample = maker(src)
    sample.skill = maker.__name__
    return sample


def make(src: Source, *, category: str | None = None, thinking: bool | None = None) -> Sample:
    """Return one conversation. Without a category, draw the category as often as in training."""
    if category is None:
        category = src.weighted([(name, share) for name, _, share in (*TURN_SKILLS, *SAMPLE_SKILLS)])
    sample = sample_of(src, category)
    if category == "thinking":
        sample.category = category
        return sample
    long = src.chance(0.015)
    if long and not sample.tools and src.chance(0.3):
        sample = needle(src, src.integer(3, 120))
        category = sample.category
    if sample.messages[0]["role"] != "system":
        roll = src.rng.random()
        if long:
            size = src.integer(10, 150)
            if src.chance(0.5) and sample.category not in ("multi-turn",):
                document(src, sample, size)
            else:
                sample.messages.insert(0, {"role": "system", "content": system_prompt(src, size)})
        elif roll < 0.33:
            sample.messages.insert(0, {"role": "system", "content": src.pick(_SHORT_SYSTEMS)})
        elif roll < 0.48:
            sample.messages.insert(0, {"role": "system", "content": system_prompt(src, src.integer(1, 8))})
    sample.thinking = src.chance(0.16) if thinking is None else thinking
    if sample.thinking and src.chance(0.5):
        for message in sample.messages[:-1]:
            message.pop("reasoning_content", None)
    elif not sample.thinking:
        for message in sample.messages:
            message.pop("reasoning_content", None)
    if sample.category == "multi-turn" and sample.skill == "recall" and src.chance(0.3):
        sample.learn_last = True
        for message in sample.messages[:-1]:
            if message["role"] == "assistant" and src.chance(0.6):
                message["content"] = src.pick(_REPLIES)
    return sample


def training_sample(seed: int, batch: int, index: int) -> Sample:
    return make(Source(f"train {seed} {batch} {index}"))


def held_out_samples(category: str, count: int, seed: int = SEED) -> list[Sample]:
    """Return samples whose names, made-up words, long numbers and tool names are never used in training."""
    return [
        make(
            Source(f"held out {seed} {category} {index}", held_out=True),
            category=category,
            thinking=category == "thinking",
        )
        for index in range(count)
    ]
