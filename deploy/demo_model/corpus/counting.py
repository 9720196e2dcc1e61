"""Counting numbers, words, letters and things; spelling."""

from .samples import Turn
from .words import Source
from .world import ORDINALS


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
    templates = [
        "Count from {a} to {b}.", "Can you count from {a} to {b}?", "Count {a} to {b}", "List the numbers from {a} to {b}.",
        "Write the numbers from {a} to {b}.", "Give me all numbers from {a} to {b}.", "Numbers from {a} to {b}, please.",
        "I want you to count from {a} to {b}.", "Say the numbers {a} to {b}.", "count from {a} up to {b}" if kind == "up" else
        "count from {a} down to {b}", "Start at {a} and count to {b}.", "Please count starting at {a} and ending at {b}.",
    ]  # fmt: skip
    if kind == "down":
        templates += ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Do a countdown from {a} to {b}.",
                      "Countdown from {a} to {b}", "Count backward from {a} to {b}", "Count down from {a} to {b}, please."]  # fmt: skip
    elif low == 1:
        templates += ["Count to {b}.", "Can you count to {b}?", "Count up to {b}"]
    step = 1 if kind == "up" else -1
    answer = ", ".join(str(n) for n in range(low, high + step, step))
    return Turn(src.ask(templates, a=low, b=high), answer, f"I count from {low} to {high}.")


def _steps(src: Source) -> Turn:
    step = src.pick((2, 2, 3, 5, 5, 10, 10))
    start = src.pick((0, step, step, 1 if step == 2 else step))
    stop = start + step * src.integer(3, 10)
    user = src.ask(
        ("Count from {a} to {b} by {s}s.", "Count from {a} to {b} in steps of {s}.", "Count by {s} from {a} to {b}.",
         "List the numbers from {a} to {b} in steps of {s}.", "Count in {s}s from {a} to {b}.", "Count {a} to {b} by {s}",
         "Give the numbers from {a} to {b}, step {s}."), a=start, b=stop, s=step,
    )  # fmt: skip
    return Turn(
        user,
        ", ".join(str(n) for n in range(start, stop + 1, step)),
        f"I count from {start} to {stop} in steps of {step}.",
    )


def _words(src: Source) -> Turn:
    words = src.words(2, 9) if src.chance(0.5) else src.sentence().split()
    text = " ".join(words)
    user = src.ask(
        ('How many words are in "{t}"?', "How many words are in this sentence: {t}", "Count the words: {t}",
         "How many words does this have: {t}", "Count the words in '{t}'.", "Number of words in: {t}",
         "Tell me how many words are in this text: {t}", 'Count the words in the sentence "{t}"',
         "How many words does '{t}' contain?", "word count: {t}", "How many words can you find in: {t}",
         "What is the word count of \"{t}\"?"), t=text,
    )  # fmt: skip
    return Turn(
        user,
        str(len(words)),
        "I count: " + " ".join(f"{i} {w.strip('.,!?')}" for i, w in enumerate(words, 1)) + ".",
    )


def _letters(src: Source) -> Turn:
    word = src.word()
    user = src.ask(
        ("How many letters are in {w}?", 'How many letters are in the word "{w}"?', "How many letters does {w} have?",
         "Count the letters in '{w}'.", "Number of letters in {w}?", "How many letters has the word {w}?",
         "How long is the word {w}?", "Tell me how many letters \"{w}\" has.", "Count the letters: {w}",
         "How many characters are in {w}?", "What is the length of the word '{w}'?", "letter count of {w}"), w=word,
    )  # fmt: skip
    return Turn(user, str(len(word)), f"{'-'.join(word)} has {len(word)} letters.")


def _items(src: Source) -> Turn:
    words = src.words(2, 8)
    listed = ", ".join(words) if src.chance(0.5) else ", ".join(words[:-1]) + " and " + words[-1]
    user = src.ask(
        ("How many items are in this list: {t}", "How many things are in the list {t}?", "Count the items: {t}",
         "How many items are here: {t}?", "Count the elements of this list: {t}", "Number of items in {t}?",
         "How many entries does this list have: {t}", "I bought {t}. How many things did I buy?"), t=listed,
    )  # fmt: skip
    return Turn(user, str(len(words)), "I count: " + " ".join(f"{i} {w}" for i, w in enumerate(words, 1)) + ".")


def _neighbour(src: Source) -> Turn:
    number = src.integer(0, src.pick((20, 99, 999)))
    after = src.chance(0.6)
    user = src.ask(
        ("What number comes {d} {n}?", "Which number comes {d} {n}?", "What is the number {d} {n}?", "Which number is {d} {n}?",
         "Tell me the number {d} {n}.", "What number comes right {d} {n}?", "Name the number {d} {n}."),
        d="after" if after else "before", n=number + (0 if after else 1),
    )  # fmt: skip
    answer = number + 1 if after else number
    return Turn(user, str(answer), f"It is {answer}.")


def spelling(src: Source) -> Turn:
    word = src.name() if src.chance(0.15) else src.word()
    kind = src.integer(0, 9)
    if kind < 7:
        user = src.ask(
            ("Spell {w}.", 'Spell the word "{w}".', "How do you spell {w}?", "Can you spell {w}?", "Spell '{w}' for me.", "spell {w}",
             "Please spell the word {w}.", "How is {w} spelled?", "Spell out {w}.", "Spell out the word '{w}'.",
             "What is the spelling of {w}?", "Spell {w} letter by letter.", "Give me the letters of {w}.", "Write {w} letter by letter.",
             'How do you spell the word "{w}"?', "Could you spell \"{w}\"?", "What are the letters in {w}?", "I can't spell {w}. Help!",
             "Tell me how to spell {w}.", "spelling of {w}?", "Break {w} into letters.", "List the letters of the word {w}.",
             "How would you spell {w}?", "Say the letters of {w} one by one."), w=word,
        )  # fmt: skip
        return Turn(user, "-".join(word), f"The letters of {word} are {' '.join(word)}.")
    if kind < 9:
        first = src.chance(0.6)
        user = src.ask(
            ("What is the {p} letter of {w}?", 'What\'s the {p} letter of "{w}"?', "Which letter does {w} {v} with?",
             "Give me the {p} letter of {w}.", "What letter does '{w}' {v} with?", "Tell me the {p} letter of the word {w}.",
             "{p} letter of {w}?"), p="first" if first else "last", v="start" if first else "end", w=word,
        )  # fmt: skip
        return Turn(user, word[0] if first else word[-1], f"The letters of {word} are {' '.join(word)}.")
    place = src.integer(1, min(5, len(word)))
    user = src.ask(
        ("What is the {p} letter of {w}?", 'What\'s the {p} letter of "{w}"?', "Give me the {p} letter of {w}.",
         "Tell me the {p} letter of the word {w}.", "{p} letter of {w}?", "Which letter is the {p} in {w}?"), p=ORDINALS[place - 1], w=word,
    )  # fmt: skip
    return Turn(user, word[place - 1], f"The letters of {word} are {' '.join(word)}.")
