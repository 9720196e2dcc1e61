"""Word lists, and `Source`: the seeded place where a sample takes its words, names, numbers and phrasings from.

Names, cities, made-up words and long numbers belong to one split for good, by their checksum, and `RARE` words are only
ever measured: what a held-out sample is about was never seen in training.
"""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

NAMES: Final = (
    "Ada Adam Aisha Alan Alba Alice Amara Amir Ana Anders Andrea Anna Anton Arjun Astrid Aya Ben Beatrice Bella Boris "
    "Bruno Carla Carlos Carmen Cecil Chen Chloe Clara Cora Daisy Daniel Daria David Diego Dina Dora Edgar Elena Eli "
    "Elias Ella Emil Emma Enzo Erik Esther Eva Fatima Felix Fiona Frank Freya Gabriel George Greta Hana Hannah Hassan "
    "Hector Helen Henry Hugo Ibrahim Ida Igor Ines Ingrid Irene Iris Ivan Ivy Jack Jacob James Jana Jasper Javier Jin "
    "Joan John Jonas Jorge Josef Julia Kai Karim Karl Kate Kenji Kira Klaus Lara Laura Lea Leila Lena Leo Liam Lily "
    "Lina Linus Lisa Lola Louis Lucas Lucy Luis Luna Maja Marco Maria Mario Mark Marta Mary Mateo Maya Mia Mika Milan "
    "Mila Mina Mohammed Mona Nadia Naomi Nathan Nell Nico Nina Noah Nora Olga Oliver Olivia Omar Oscar Otto Pablo Paul "
    "Paula Pedro Peter Petra Priya Quinn Rafael Raj Rania Rita Robert Robin Rosa Ruben Ruth Sam Samir Sara Sarah Sasha "
    "Selma Simon Sofia Sonia Stella Sven Tara Theo Thomas Tim Tina Tom Uma Vera Victor Viola Walter Wanda Wei Will "
    "Xenia Yara Yuki Yusuf Zara Zoe Michael Jennifer Linda William Richard Joseph Charles Emily Sophie Grace Ethan "
    "Mason Logan Aiden Jackson Harper Evelyn Abigail Amelia Charlotte Isabella"
).split()
SURNAMES: Final = (
    "Smith Jones Brown Taylor Wilson Evans Walker Wright Green Hall Wood Clarke Hughes Turner Hill Moore Cooper Ward "
    "Morris King Baker Lopez Garcia Silva Santos Costa Rossi Weber Fischer Meyer Schulz Novak Horvat Nielsen Hansen "
    "Larsen Berg Lind Tanaka Sato Suzuki Kim Lee Park Chen Wang Zhang Liu Singh Patel Khan Ali Haddad Okafor Mensah "
    "Diaz Torres Ramos Petrov Popov Kowalski Murphy Kelly Ryan Stone Fox Frost Reed Marsh"
).split()
CITIES: Final = (
    "Paris London Berlin Madrid Rome Oslo Vienna Prague Lisbon Dublin Athens Warsaw Helsinki Stockholm Copenhagen "
    "Amsterdam Brussels Zurich Geneva Milan Naples Turin Venice Munich Hamburg Cologne Dresden Lyon Marseille Nice "
    "Bordeaux Porto Seville Valencia Barcelona Bilbao Krakow Gdansk Budapest Bucharest Sofia Belgrade Zagreb Istanbul "
    "Ankara Cairo Lagos Nairobi Accra Tunis Casablanca Dakar Mumbai Delhi Chennai Kolkata Lahore Karachi Dhaka Tokyo "
    "Osaka Kyoto Seoul Busan Beijing Shanghai Bangkok Hanoi Manila Jakarta Singapore Sydney Melbourne Perth Auckland "
    "Toronto Montreal Vancouver Boston Chicago Denver Seattle Austin Dallas Houston Miami Atlanta Phoenix Portland "
    "Detroit Lima Bogota Quito Santiago Havana Caracas Brasilia Recife Salvador Cordoba Rosario Leeds Bristol "
    "Glasgow Cardiff Liverpool Galway Bergen Malmo Aarhus Tampere Riga Vilnius Tallinn"
).split() + ["New York", "Los Angeles", "San Francisco", "Mexico City", "Cape Town", "Buenos Aires", "Hong Kong",
             "Rio de Janeiro", "Tel Aviv", "San Diego", "Las Vegas", "New Delhi"]  # fmt: skip
COLOURS: Final = (
    "red blue green yellow orange purple pink brown black white grey silver gold violet turquoise teal beige maroon "
    "navy cyan magenta crimson indigo olive lavender coral"
).split()
ANIMALS: Final = (
    "cat dog horse cow sheep goat pig rabbit mouse lion tiger bear wolf fox deer monkey elephant giraffe zebra camel "
    "eagle owl duck goose swan parrot penguin whale dolphin shark salmon frog snake lizard turtle crab spider ant bee "
    "butterfly otter badger hedgehog squirrel hamster raven falcon octopus seal koala panda donkey"
).split()
FOODS: Final = (
    "apple banana cherry grape lemon mango melon orange peach pear plum kiwi bread butter cheese milk eggs rice pasta "
    "soup salad pizza tomato potato onion carrot garlic pepper beans corn honey sugar salt flour yogurt coffee tea "
    "juice chocolate cake cookies sushi tacos noodles curry olives nuts spinach broccoli mushrooms bacon fish chicken "
    "cereal pancakes waffles avocado basil ginger vanilla cinnamon"
).split()
NOUNS: Final = (
    "house garden river mountain forest window door table chair lamp book pencil paper letter box bottle cup plate "
    "spoon knife clock watch phone camera radio engine wheel bridge road train plane boat ship anchor rope ladder "
    "hammer nail brick stone sand snow rain cloud storm wind fire smoke shadow mirror candle basket blanket pillow "
    "carpet curtain drawer shelf key lock wallet ticket map compass tent lantern bucket broom needle thread button "
    "pocket jacket glove scarf boot hat ring crown sword shield arrow drum guitar piano violin flute bell song story "
    "poem dream secret puzzle riddle game ball kite robot rocket planet star moon sun ocean island beach harbor "
    "valley desert meadow field farm barn fence gate tower castle palace temple museum library school hospital market "
    "station airport office kitchen bedroom cellar attic roof chimney wall floor stairs corner street square park "
    "fountain statue flag coin jewel pearl diamond feather leaf flower tree root seed branch acorn berry cactus "
    "server printer keyboard monitor laptop tablet cable battery sensor router folder file report invoice budget "
    "meeting project task calendar message note reminder budget parcel package order delivery warehouse truck"
).split()
ADJECTIVES: Final = (
    "big small old new young quick slow bright dark happy sad calm loud quiet warm cold soft hard heavy light clean "
    "dirty sharp smooth rough sweet bitter fresh dry wet strong weak brave shy clever simple strange common rare tall "
    "short wide narrow deep shallow empty full round flat busy lazy gentle wild ancient modern golden silver wooden "
    "silent curious patient honest humble grand tiny giant"
).split()
VERBS: Final = (
    "run walk jump sing dance read write draw paint cook bake clean wash build break fix open close push pull carry "
    "lift drop throw catch find lose hide seek buy sell give take send bring keep leave stay move turn stop start wait "
    "watch listen speak ask answer call visit meet help learn teach play work rest sleep dream laugh cry smile climb "
    "swim fly drive ride sail travel"
).split()
HOBBIES: Final = (
    "chess tennis painting cycling swimming hiking reading gardening fishing cooking photography dancing climbing "
    "football running sailing knitting baking skiing surfing pottery archery yoga birdwatching camping drawing"
).split()
JOBS: Final = (
    "teacher doctor nurse pilot baker farmer lawyer painter plumber carpenter engineer gardener journalist librarian "
    "chef dentist architect electrician musician writer photographer translator mechanic sailor scientist biologist "
    "designer programmer waiter firefighter"
).split()
WEEKDAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS: Final = ("January February March April May June July August September October November December").split()
NUMBER_WORDS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
LANGUAGES: Final = (
    "English French German Spanish Italian Portuguese Dutch Swedish Norwegian Danish Finnish Polish Czech Greek "
    "Turkish Arabic Hebrew Hindi Bengali Tamil Chinese Japanese Korean Thai Vietnamese Russian Ukrainian Romanian"
).split()
# Never in training: plain English words that a measurement uses.
RARE: Final = (
    "harvest velvet pumpkin lighthouse canyon blossom thunder whisker galaxy orchard pebble walnut marble tundra willow cobalt "
    "falafel juniper kettle lagoon mosaic nectar oyster parsley quarry raspberry saffron thimble umbrella violet waffle yodel "
    "zeppelin almond bamboo cathedral dungeon elbow fiddle goblin hazelnut icicle jigsaw kiosk lobster mustard napkin oatmeal "
    "pancake quiver radish satellite trampoline unicorn vinegar walrus xylophone yacht zipper anvil biscuit cobweb dragon ember "
    "fossil gravel hammock igloo jungle kernel locket magnet nugget oxygen pirate quilt ribbon spiral tunnel urchin vortex wizard"
).split()
COMMON_WORDS: Final = [*NOUNS, *ADJECTIVES, *VERBS, *ANIMALS, *FOODS, *COLOURS, *HOBBIES, *JOBS]

ONSETS: Final = (
    "b br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sc sh sk sl sm sn sp st str t th tr v w wh "
    "z y x"
).split()
VOWELS: Final = "a e i o u a e i o u ai au ea ee ei ia ie io oa oo ou y".split()
CODAS: Final = [
    "",
    "",
    "",
    *"b ck d f g k l ll ld lt m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t th x z".split(),
]

_OPENERS: Final = (
    "Please ", "Hey, ", "Hi! ", "Hello. ", "Quick question: ", "Question: ", "Hey there, ", "So, ", "OK, ", "Now ", "Well, ", "Task: ", "Could you do this? ", "I have a request. ",
    "Answer briefly. ", "Reply with the answer only. ", "Answer in one word. ", "No explanation, please. ", "Only give the result. ", "Just for fun: ", "Next: ", "Hello! ", "One more: ",
)  # fmt: skip
_CLOSERS: Final = (
    " Thanks!", " Thank you.", " Please.", " Thanks in advance.", " Be quick.", " I need it now.", " Reply with only the answer.", " Answer with one word.", " Just the answer.", " No explanation.",
    " Only the answer, please.", " Do not explain.", " Answer briefly.", " Give only the result.",
)  # fmt: skip
_SMALL_WORDS: Final = frozenset("the of a an to this me please for these that you and following exactly".split())
_FILLERS: Final = ("just", "now", "quickly", "simply", "exactly", "please", "also", "kindly", "really", "then")
_PLACEHOLDER_END: Final = re.compile(r"\{\w+\}[\"'`.?!]*$")


def is_held_out(word: str) -> bool:
    """Whether `word` may only be used to measure, never to train."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


@cache
def own_words() -> list[str]:
    """The words that this recipe was made of. The tokenizer knows them, so the model must have copied each of them."""
    return Path(__file__).with_name("own_words.txt").read_text().split()


class Source:
    """Everything random in one sample, drawn from one split."""

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
        """An item of this split."""
        while True:
            item = self.pick(items)
            if is_held_out(item) == self.held_out:
                return item

    def made(self, make: Callable[[], str]) -> str:
        """A made-up word of this split."""
        while True:
            word = make()
            if is_held_out(word) == self.held_out:
                return word

    def template(self, templates: Sequence[str]) -> str:
        return self.pick(templates)

    def ask(self, templates: Sequence[str], /, **slots: object) -> str:
        """A request in one of many phrasings, as sloppy or polite as people are."""
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
        """The phrasing with a small word dropped or added, so that no phrasing is learned by heart."""
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
        """Almost a word that is known, so that it must be copied with care: two words joined, or one with a wrong letter."""
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
        """Distinct words."""
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
        """A positive number; one of three digits or more belongs to one split."""
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
        """A plain sentence, to be copied or taken apart."""
        return self.pick(SENTENCES).format(
            name=self.name(), city=self.city(), adj=self.pick(ADJECTIVES), adj2=self.pick(ADJECTIVES),
            noun=self.noun(), noun2=self.noun(), animal=self.pick(ANIMALS), food=self.pick(FOODS),
            verb=self.pick(VERBS), verb2=self.pick(VERBS), day=self.pick(WEEKDAYS), number=self.integer(2, 99),
            colour=self.colour(), word=self.word(),
        )  # fmt: skip

    def paragraph(self, sentences: int) -> str:
        return " ".join(self.sentence() for _ in range(sentences))


SENTENCES: Final = (
    "The {adj} {animal} sat near the {noun}.",
    "{name} bought {number} {adj} {noun}s in {city}.",
    "Every {day} we {verb} and {verb2} by the {noun}.",
    "The {noun} is {adj} but the {noun2} is {adj2}.",
    "I saw a {colour} {noun} on the way to {city}.",
    "My friend {name} likes {food} and {adj} {animal}s.",
    "We will {verb} on {day} at the {noun}.",
    "Nobody in {city} has seen the {adj} {noun}.",
    "There are {number} {noun}s in the {adj} {noun2}.",
    "{name} and the {animal} {verb} together.",
    "The quick {colour} {animal} jumps over the {adj} {noun}.",
    "A {noun} without a {noun2} is {adj}.",
    "Our {noun} needs a new {noun2} before {day}.",
    "Please do not {verb} the {adj} {noun}.",
    "It was a {adj} day in {city}, and {name} had {food} for lunch.",
    "All {noun}s must {verb} before the {animal} can {verb2}.",
    "Hello from {city}!",
    "The {word} and the {noun} are {adj}.",
    "{name} keeps {number} {noun}s under the {noun2}.",
    "Is the {noun} {adj} or {adj2}?",
    "the {adj} {noun}",
    "{word} {noun} {word}",
    "I love {food}.",
    "Good morning, {name}!",
    "{name} lives in {city} with a {adj} {animal}.",
    "Time flies when you {verb} with a {animal}.",
)
