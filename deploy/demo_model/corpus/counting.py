"""Counting skills: count numbers, words, letters and things, and spell words."""

from typing import Final

from .files import phrasings, word_list
from .samples import Turn
from .words import Source

ORDINALS: Final = word_list("ordinals")


def counting(src: Source) -> Turn:
    kinds = ((_up, 4), (_down, 2), (_steps, 1.5), (_words, 3), (_letters, 3), (_items, 2), (_neighbour, 1))
    return src.weighted(kinds)(src)


def _up(src: Source) -> Turn:
    return _range(src, "up")


def _down(src: Source) -> Turn:
    return _range(src, "down")


def _range(src: Source, kind: str) -> Turn:
    start = src.pick((1, 1, src.integer(0, 20), src.integer(0, 90)))
    stop = start + src.integer(2, 20)
    low, high = (start, stop) if kind == "up" else (stop, start)
    templates = [*phrasings("counting", kind)]
    if kind == "up" and low == 1:
        templates += ["Count to {b}.", "Can you count to {b}?", "Count up to {b}"]
    step = 1 if kind == "up" else -1
    answer = ", ".join(str(n) for n in range(low, high + step, step))
    return Turn(src.ask(templates, a=low, b=high), answer, f"I count from {low} to {high}.")


def _steps(src: Source) -> Turn:
    step = src.pick((2, 2, 3, 5, 5, 10, 10))
    start = src.pick((0, step, step, 1 if step == 2 else step))
    stop = start + step * src.integer(3, 10)
    user = src.ask(phrasings("counting", "steps"), a=start, b=stop, s=step)
    return Turn(
        user,
        ", ".join(str(n) for n in range(start, stop + 1, step)),
        f"I count from {start} to {stop} in steps of {step}.",
    )


def _words(src: Source) -> Turn:
    words = src.words(2, 9) if src.chance(0.5) else src.sentence().split()
    text = " ".join(words)
    user = src.ask(phrasings("counting", "words"), t=text)
    return Turn(
        user, str(len(words)), "I count: " + " ".join(f"{i} {w.strip('.,!?')}" for i, w in enumerate(words, 1)) + "."
    )


def _letters(src: Source) -> Turn:
    word = src.word()
    user = src.ask(phrasings("counting", "letters"), w=word)
    return Turn(user, str(len(word)), f"{'-'.join(word)} has {len(word)} letters.")


def _items(src: Source) -> Turn:
    words = src.words(2, 8)
    listed = ", ".join(words) if src.chance(0.5) else ", ".join(words[:-1]) + " and " + words[-1]
    user = src.ask(phrasings("counting", "items"), t=listed)
    return Turn(user, str(len(words)), "I count: " + " ".join(f"{i} {w}" for i, w in enumerate(words, 1)) + ".")


def _neighbour(src: Source) -> Turn:
    number = src.integer(0, src.pick((20, 99, 999)))
    after = src.chance(0.6)
    user = src.ask(phrasings("counting", "neighbour"), d="after" if after else "before", n=number + (0 if after else 1))
    answer = number + 1 if after else number
    return Turn(user, str(answer), f"It is {answer}.")


def spelling(src: Source) -> Turn:
    word = src.name() if src.chance(0.15) else src.word()
    kind = src.integer(0, 9)
    if kind < 7:
        user = src.ask(phrasings("counting", "spell"), w=word)
        return Turn(user, "-".join(word), f"The letters of {word} are {' '.join(word)}.")
    if kind < 9:
        first = src.chance(0.6)
        user = src.ask(
            phrasings("counting", "nth_letter"), p="first" if first else "last", v="start" if first else "end", w=word
        )
        return Turn(user, word[0] if first else word[-1], f"The letters of {word} are {' '.join(word)}.")
    place = src.integer(1, min(5, len(word)))
    user = src.ask(phrasings("counting", "last_letter"), p=ORDINALS[place - 1], w=word)
    return Turn(user, word[place - 1], f"The letters of {word} are {' '.join(word)}.")
