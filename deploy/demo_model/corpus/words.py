"""Word lists, and `Source`, the seeded random source of a sample's words, names, numbers and phrasings.

A checksum assigns each name, city, made-up word and long number to one split, and `RARE` words are only used for
measurements. So the facts of a held-out sample never occurred in training.
"""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, TypeVar

from .files import phrasings, word_list

T = TypeVar("T")

NAMES: Final = word_list("names")
SURNAMES: Final = word_list("surnames")
CITIES: Final = word_list("cities")
COLOURS: Final = word_list("colours")
ANIMALS: Final = word_list("animals")
FOODS: Final = word_list("foods")
NOUNS: Final = word_list("nouns")
ADJECTIVES: Final = word_list("adjectives")
VERBS: Final = word_list("verbs")
HOBBIES: Final = word_list("hobbies")
JOBS: Final = word_list("jobs")
WEEKDAYS: Final = word_list("weekdays")
MONTHS: Final = word_list("months")
NUMBER_WORDS: Final = word_list("number_words")
LANGUAGES: Final = word_list("languages")
# Plain English words that only measurements use, never training.
RARE: Final = word_list("rare")
COMMON_WORDS: Final = [*NOUNS, *ADJECTIVES, *VERBS, *ANIMALS, *FOODS, *COLOURS, *HOBBIES, *JOBS]

ONSETS: Final = phrasings("words", "onsets")
VOWELS: Final = phrasings("words", "vowels")
CODAS: Final = phrasings("words", "codas")

_OPENERS: Final = phrasings("words", "openers")
_CLOSERS: Final = phrasings("words", "closers")
_SMALL_WORDS: Final = frozenset(word_list("small_words"))
_FILLERS: Final = word_list("fillers")
_PLACEHOLDER_END: Final = re.compile(r"\{\w+\}[\"'`.?!]*$")


def is_held_out(word: str) -> bool:
    """Whether only measurements may use `word`, and never training."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


@cache
def own_words() -> list[str]:
    """Return the words of the recipe's own text at the time when it trained the shipped weights.

    The tokenizer's vocabulary contains these words, so the model must have learned to copy each of them.
    """
    return word_list("own_words")


class Source:
    """Source of all randomness in one sample; all its words are from one split."""

    def __init__(self, seed: str, *, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(items, count)

    def weighted(self, choices: Sequence[tuple[T, float]]) -> T:
        items, weights = zip(*choices, strict=True)
        return self.rng.choices(items, weights)[0]

    def mine(self, items: Sequence[str]) -> str:
        """Return a random item of this split."""
        while True:
            item = self.pick(items)
            if is_held_out(item) == self.held_out:
                return item

    def made(self, make: Callable[[], str]) -> str:
        """Return a made-up word of this split."""
        while True:
            word = make()
            if is_held_out(word) == self.held_out:
                return word

    def template(self, templates: Sequence[str]) -> str:
        return self.pick(templates)

    def ask(self, templates: Sequence[str], /, **slots: object) -> str:
        """Return a request in one of many phrasings, as sloppy or polite as people write."""
        text = self.template(templates)
        if self.chance(0.15):
            text = self.reworded(text)
        if self.chance(0.15) and text.endswith(": {t}"):
            text = text.removesuffix(" {t}") + self.pick(("\n{t}", "\n\n{t}", ' "{t}"', " '{t}'", "{t}"))
        if self.chance(0.12):
            text = text.lower()
        elif self.chance(0.06):
            text = text[:1].lower() + text[1:]
        if self.chance(0.15) and text[-1:] in ".?!":
            text = text[:-1]
        if self.chance(0.18):
            opener = self.pick(_OPENERS)
            lowers = opener in ("Please ", "Hey, ", "Hey there, ", "So, ", "OK, ", "Now ", "Well, ")
            text = opener + (text[:1].lower() + text[1:] if lowers else text)
        if self.chance(0.12) and not _PLACEHOLDER_END.search(text):
            text = (text if text[-1:] in ".?!" else text + ".") + self.pick(_CLOSERS)
        return text.format(**slots)

    def reworded(self, text: str) -> str:
        """Drop or add a small word, so that the model does not memorize phrasings."""
        words = text.split(" ")
        small = [i for i, word in enumerate(words) if word.lower() in _SMALL_WORDS]
        if small and self.chance(0.7):
            del words[self.pick(small)]
        else:
            words.insert(self.integer(0, max(0, len(words) - 1)), self.pick(_FILLERS))
        return " ".join(words) or text

    # words

    def syllables(self, low: int = 1, high: int = 3) -> str:
        return "".join(
            self.pick(ONSETS) + self.pick(VOWELS) + (self.pick(CODAS) if self.chance(0.6) else "")
            for _ in range(self.integer(low, high))
        )

    def coined(self, low: int = 1, high: int = 3) -> str:
        return self.made(lambda: self.syllables(low, high))

    def grafted(self) -> str:
        """Return a word that resembles a known one, so that copying it needs care: two joined words, or a wrong
        letter."""
        left, right = self.pick(own_words()), self.pick(own_words())
        if self.chance(0.6):
            return left[: self.integer(1, min(len(left), 6))] + right[-self.integer(1, min(len(right), 6)) :]
        place = self.integer(0, len(left) - 1)
        letter = self.pick("abcdefghijklmnopqrstuvwxyz")
        return left[:place] + self.pick((letter, "", letter + left[place])) + left[place + 1 :] or left

    def word(self) -> str:
        roll = self.rng.random()
        if roll < 0.28:
            return self.pick(COMMON_WORDS)
        if roll < 0.72:
            if self.held_out:
                return self.pick(RARE)
            return self.pick(own_words()) if self.chance(0.45) else self.made(self.grafted)
        return self.coined()

    def noun(self) -> str:
        roll = self.rng.random()
        if roll < 0.5:
            return self.pick(NOUNS)
        if roll < 0.78:
            return (
                self.pick(RARE)
                if self.held_out
                else self.pick(own_words())
                if self.chance(0.5)
                else self.made(self.grafted)
            )
        return self.coined(1, 2)

    def thing(self) -> str:
        return self.pick(self.pick((NOUNS, FOODS, ANIMALS, NOUNS)))

    def words(self, low: int, high: int) -> list[str]:
        """Return distinct words."""
        found: dict[str, None] = {}
        count = self.integer(low, high)
        pool = self.pick((None, None, None, ANIMALS, FOODS, NOUNS, COLOURS))
        if pool is not None and self.chance(0.9):
            count = min(count, 4)
        while len(found) < count:
            found[self.pick(pool) if pool is not None and len(found) < 3 else self.word()] = None
        return list(found)

    def name(self) -> str:
        if self.chance(0.2):
            return self.word().capitalize()
        return self.mine(NAMES) if self.chance(0.5) else self.coined(1, 3).capitalize()

    def full_name(self) -> str:
        surname = self.mine(SURNAMES) if self.chance(0.6) else self.coined(1, 3).capitalize()
        return f"{self.name()} {surname}"

    def city(self) -> str:
        if self.chance(0.15):
            return self.word().capitalize()
        return self.mine(CITIES) if self.chance(0.55) else self.coined(1, 3).capitalize()

    def colour(self) -> str:
        return self.pick(COLOURS)

    def number(self) -> int:
        """Return a positive number; numbers of three or more digits belong to one split."""
        high = self.pick((9, 20, 99, 99, 999, 9999, 99999))
        while True:
            number = self.integer(1, high)
            if number < 100 or is_held_out(str(number)) == self.held_out:
                return number

    def decimal(self) -> float:
        return round(self.rng.uniform(0.1, self.pick((9, 99, 999))), self.pick((1, 2)))

    def code(self) -> str:
        letters = "".join(self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(self.integer(1, 3)))
        digits = "".join(self.pick("0123456789") for _ in range(self.integer(2, 5)))
        return letters + self.pick(("-", "", "")) + digits

    def date(self) -> str:
        day, month, year = self.integer(1, 28), self.integer(1, 12), self.integer(1990, 2035)
        style = self.integer(0, 3)
        if style < 2:
            return f"{year}-{month:02}-{day:02}"
        return f"{MONTHS[month - 1]} {day}" if style == 2 else f"{day} {MONTHS[month - 1]} {year}"

    def time(self) -> str:
        hour, minute = self.integer(0, 23), self.pick((0, 15, 30, 45, self.integer(0, 59)))
        return f"{hour:02}:{minute:02}" if self.chance(0.7) else f"{hour % 12 + 1} {self.pick(('am', 'pm'))}"

    def email(self) -> str:
        who = self.pick((self.name(), self.coined())).lower()
        return f"{who}@{self.coined(1, 2)}.{self.pick(('com', 'org', 'net', 'io'))}"

    def sentence(self) -> str:
        """Return a plain sentence to copy or to take apart."""
        return self.pick(SENTENCES).format(
            name=self.name(),
            city=self.city(),
            adj=self.pick(ADJECTIVES),
            adj2=self.pick(ADJECTIVES),
            noun=self.noun(),
            noun2=self.noun(),
            animal=self.pick(ANIMALS),
            food=self.pick(FOODS),
            verb=self.pick(VERBS),
            verb2=self.pick(VERBS),
            day=self.pick(WEEKDAYS),
            number=self.integer(2, 99),
            colour=self.colour(),
            word=self.word(),
        )

    def paragraph(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))


SENTENCES: Final = phrasings("words", "sentences")
