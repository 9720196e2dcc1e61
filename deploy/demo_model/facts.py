"""The closed world: capitals, colours, opposites, days and months, and a few more things that have one answer."""

from typing import Final

from .samples import Turn
from .words import MONTHS, NUMBER_WORDS, WEEKDAYS, Source

CAPITALS: Final = dict(
    line.split(":")
    for line in [
        "Afghanistan:Kabul",
        "Albania:Tirana",
        "Algeria:Algiers",
        "Andorra:Andorra la Vella",
        "Angola:Luanda",
        "Argentina:Buenos Aires",
        "Armenia:Yerevan",
        "Australia:Canberra",
        "Austria:Vienna",
        "Azerbaijan:Baku",
        "the Bahamas:Nassau",
        "Bahrain:Manama",
        "Bangladesh:Dhaka",
        "Barbados:Bridgetown",
        "Belarus:Minsk",
        "Belgium:Brussels",
        "Belize:Belmopan",
        "Benin:Porto-Novo",
        "Bhutan:Thimphu",
        "Bolivia:Sucre",
        "Bosnia and Herzegovina:Sarajevo",
        "Botswana:Gaborone",
        "Brazil:Brasilia",
        "Brunei:Bandar Seri Begawan",
        "Bulgaria:Sofia",
        "Burkina Faso:Ouagadougou",
        "Burundi:Gitega",
        "Cambodia:Phnom Penh",
        "Cameroon:Yaounde",
        "Canada:Ottawa",
        "Chad:N'Djamena",
        "Chile:Santiago",
        "China:Beijing",
        "Colombia:Bogota",
        "Costa Rica:San Jose",
        "Croatia:Zagreb",
        "Cuba:Havana",
        "Cyprus:Nicosia",
        "the Czech Republic:Prague",
        "Czechia:Prague",
        "Denmark:Copenhagen",
        "Djibouti:Djibouti",
        "the Dominican Republic:Santo Domingo",
        "Ecuador:Quito",
        "Egypt:Cairo",
        "El Salvador:San Salvador",
        "Eritrea:Asmara",
        "Estonia:Tallinn",
        "Ethiopia:Addis Ababa",
        "Fiji:Suva",
        "Finland:Helsinki",
        "France:Paris",
        "Gabon:Libreville",
        "the Gambia:Banjul",
        "Georgia:Tbilisi",
        "Germany:Berlin",
        "Ghana:Accra",
        "Greece:Athens",
        "Guatemala:Guatemala City",
        "Guinea:Conakry",
        "Guyana:Georgetown",
        "Haiti:Port-au-Prince",
        "Honduras:Tegucigalpa",
        "Hungary:Budapest",
        "Iceland:Reykjavik",
        "India:New Delhi",
        "Indonesia:Jakarta",
        "Iran:Tehran",
        "Iraq:Baghdad",
        "Ireland:Dublin",
        "Israel:Jerusalem",
        "Italy:Rome",
        "Ivory Coast:Yamoussoukro",
        "Jamaica:Kingston",
        "Japan:Tokyo",
        "Jordan:Amman",
        "Kazakhstan:Astana",
        "Kenya:Nairobi",
        "Kosovo:Pristina",
        "Kuwait:Kuwait City",
        "Kyrgyzstan:Bishkek",
        "Laos:Vientiane",
        "Latvia:Riga",
        "Lebanon:Beirut",
        "Liberia:Monrovia",
        "Libya:Tripoli",
        "Liechtenstein:Vaduz",
        "Lithuania:Vilnius",
        "Luxembourg:Luxembourg",
        "Madagascar:Antananarivo",
        "Malawi:Lilongwe",
        "Malaysia:Kuala Lumpur",
        "the Maldives:Male",
        "Mali:Bamako",
        "Malta:Valletta",
        "Mauritania:Nouakchott",
        "Mauritius:Port Louis",
        "Mexico:Mexico City",
        "Moldova:Chisinau",
        "Monaco:Monaco",
        "Mongolia:Ulaanbaatar",
        "Montenegro:Podgorica",
        "Morocco:Rabat",
        "Mozambique:Maputo",
        "Myanmar:Naypyidaw",
        "Namibia:Windhoek",
        "Nepal:Kathmandu",
        "the Netherlands:Amsterdam",
        "New Zealand:Wellington",
        "Nicaragua:Managua",
        "Niger:Niamey",
        "Nigeria:Abuja",
        "North Korea:Pyongyang",
        "North Macedonia:Skopje",
        "Norway:Oslo",
        "Oman:Muscat",
        "Pakistan:Islamabad",
        "Panama:Panama City",
        "Papua New Guinea:Port Moresby",
        "Paraguay:Asuncion",
        "Peru:Lima",
        "the Philippines:Manila",
        "Poland:Warsaw",
        "Portugal:Lisbon",
        "Qatar:Doha",
        "Romania:Bucharest",
        "Russia:Moscow",
        "Rwanda:Kigali",
        "Samoa:Apia",
        "San Marino:San Marino",
        "Saudi Arabia:Riyadh",
        "Senegal:Dakar",
        "Serbia:Belgrade",
        "Sierra Leone:Freetown",
        "Singapore:Singapore",
        "Slovakia:Bratislava",
        "Slovenia:Ljubljana",
        "Somalia:Mogadishu",
        "South Africa:Pretoria",
        "South Korea:Seoul",
        "South Sudan:Juba",
        "Spain:Madrid",
        "Sri Lanka:Colombo",
        "Sudan:Khartoum",
        "Suriname:Paramaribo",
        "Sweden:Stockholm",
        "Switzerland:Bern",
        "Syria:Damascus",
        "Taiwan:Taipei",
        "Tajikistan:Dushanbe",
        "Tanzania:Dodoma",
        "Thailand:Bangkok",
        "Togo:Lome",
        "Tonga:Nuku'alofa",
        "Trinidad and Tobago:Port of Spain",
        "Tunisia:Tunis",
        "Turkey:Ankara",
        "Turkmenistan:Ashgabat",
        "Uganda:Kampala",
        "Ukraine:Kyiv",
        "the United Arab Emirates:Abu Dhabi",
        "the United Kingdom:London",
        "England:London",
        "Scotland:Edinburgh",
        "Wales:Cardiff",
        "the United States:Washington, D.C.",
        "the USA:Washington, D.C.",
        "the UK:London",
        "Uruguay:Montevideo",
        "Uzbekistan:Tashkent",
        "Vatican City:Vatican City",
        "Venezuela:Caracas",
        "Vietnam:Hanoi",
        "Yemen:Sana'a",
        "Zambia:Lusaka",
        "Zimbabwe:Harare",
    ]
)
WELL_KNOWN: Final = (
    "Argentina Australia Austria Belgium Brazil Bulgaria Canada Chile China Colombia Croatia Cuba Denmark Egypt "
    "Estonia Ethiopia Finland France Germany Greece Hungary Iceland India Indonesia Iran Iraq Ireland Israel Italy "
    "Jamaica Japan Jordan Kenya Latvia Lebanon Lithuania Malaysia Mexico Mongolia Morocco Nepal Nigeria Norway "
    "Pakistan Peru Poland Portugal Romania Russia Serbia Singapore Slovakia Slovenia Spain Sweden Switzerland "
    "Thailand Turkey Uganda Ukraine Uruguay Venezuela Vietnam"
).split()
COLOUR_OF: Final = dict(
    line.split(":")
    for line in [
        "the sky:blue",
        "the clear sky:blue",
        "grass:green",
        "a banana:yellow",
        "a ripe banana:yellow",
        "the sun:yellow",
        "snow:white",
        "milk:white",
        "coal:black",
        "blood:red",
        "a tomato:red",
        "a ripe tomato:red",
        "a strawberry:red",
        "an orange:orange",
        "a carrot:orange",
        "a pumpkin:orange",
        "a lemon:yellow",
        "a lime:green",
        "a leaf:green",
        "chocolate:brown",
        "coffee:brown",
        "a fire truck:red",
        "a fire engine:red",
        "a stop sign:red",
        "the ocean:blue",
        "the sea:blue",
        "an elephant:grey",
        "a flamingo:pink",
        "a pig:pink",
        "a polar bear:white",
        "a raven:black",
        "a crow:black",
        "a panda:black and white",
        "a zebra:black and white",
        "a penguin:black and white",
        "an emerald:green",
        "a ruby:red",
        "a sapphire:blue",
        "gold:gold",
        "silver:silver",
        "an eggplant:purple",
        "lavender:purple",
        "a plum:purple",
        "a cherry:red",
        "a frog:green",
        "broccoli:green",
        "spinach:green",
        "lettuce:green",
        "a cucumber:green",
        "a pea:green",
        "rice:white",
        "salt:white",
        "sugar:white",
        "flour:white",
        "cotton:white",
        "a cloud:white",
        "the moon:white",
        "the night sky:black",
        "a school bus:yellow",
        "corn:yellow",
        "butter:yellow",
        "an egg yolk:yellow",
        "a sunflower:yellow",
        "a canary:yellow",
        "a chick:yellow",
        "honey:golden",
        "a brick:red",
        "a rose:red",
        "a ladybug:red",
        "a lobster:red",
        "wood:brown",
        "soil:brown",
        "mud:brown",
        "a bear:brown",
        "tea:brown",
        "peanut butter:brown",
        "a blueberry:blue",
        "a blue whale:blue",
        "a swan:white",
        "paper:white",
        "bone:white",
        "a tooth:white",
        "a tire:black",
        "ink:black",
        "asphalt:black",
        "ash:grey",
        "concrete:grey",
        "a mouse:grey",
        "a dolphin:grey",
        "a shark:grey",
        "a kiwi:green",
        "an avocado:green",
        "mint:green",
        "a cactus:green",
        "a tennis ball:yellow",
        "a basketball:orange",
        "a fox:orange",
        "a goldfish:orange",
        "a salmon:pink",
        "charcoal:black",
        "ivory:white",
        "rust:brown",
        "copper:brown",
        "bubblegum:pink",
        "a grape:purple",
        "a violet:purple",
        "garlic:white",
        "a taxi in New York:yellow",
    ]
)
OPPOSITES: Final = [
    tuple(pair.split("-"))
    for pair in (
        "hot-cold big-small tall-short fast-slow happy-sad up-down left-right open-closed full-empty light-dark day-night "
        "good-bad new-old hard-soft wet-dry rich-poor strong-weak early-late near-far high-low long-brief wide-narrow "
        "thick-thin clean-dirty loud-quiet easy-difficult true-false right-wrong heavy-weightless begin-end start-stop "
        "win-lose buy-sell push-pull love-hate laugh-cry give-take come-go in-out on-off over-under above-below "
        "inside-outside before-after first-last front-back top-bottom north-south east-west black-white male-female man-woman "
        "boy-girl king-queen brother-sister mother-father friend-enemy question-answer war-peace life-death summer-winter "
        "spring-autumn morning-evening noon-midnight sun-moon heaven-hell always-never everything-nothing everyone-nobody "
        "more-less many-few all-none same-different alive-dead asleep-awake sick-healthy brave-cowardly bright-dim "
        "sharp-blunt smooth-rough sweet-sour fresh-stale cheap-expensive safe-dangerous simple-complex "
        "possible-impossible visible-invisible polite-rude patient-impatient kind-cruel generous-selfish honest-dishonest "
        "lucky-unlucky modern-ancient public-private maximum-minimum plus-minus positive-negative arrive-depart "
        "accept-refuse attack-defend borrow-lend break-repair build-destroy catch-throw remember-forget find-misplace float-sink "
        "follow-lead freeze-melt grow-shrink hide-reveal increase-decrease join-separate allow-forbid praise-criticize "
        "raise-lower save-spend sit-stand sleep-wake succeed-fail tighten-loosen whisper-shout work-rest young-elderly "
        "beautiful-ugly deep-shallow future-past entrance-exit guilty-innocent horizontal-vertical import-export "
        "interesting-boring tame-wild temporary-permanent tiny-huge victory-defeat yes-no hello-goodbye "
        "here-there north-south narrow-broad proud-ashamed lazy-hardworking busy-idle calm-nervous crowded-deserted "
        "straight-crooked wise-foolish often-seldom inner-outer senior-junior giant-dwarf create-destroy "
        "ascend-descend expand-contract include-exclude appear-disappear agree-disagree connect-disconnect lock-unlock "
        "tie-untie pack-unpack present-absent major-minor optimist-pessimist sunrise-sunset profit-loss success-failure "
        "strength-weakness length-width hero-villain teacher-student doctor-patient question-reply noisy-silent "
        "large-little rapid-sluggish warm-cool shut-open smart-stupid clever-foolish angry-calm cheerful-gloomy"
    ).split()
]
# Both directions, except where a word would get two answers.
OPPOSITE_OF: Final[dict[str, str]] = {}
for _left, _right in OPPOSITES:
    OPPOSITE_OF.setdefault(_left, _right)
for _left, _right in OPPOSITES:
    OPPOSITE_OF.setdefault(_right, _left)
OPPOSITE_OF.update(
    {"long": "short", "short": "tall", "closed": "open", "old": "new", "young": "old", "heavy": "light",
     "light": "dark", "lose": "win", "find": "lose", "little": "big", "down": "up", "difficult": "easy"}
)  # fmt: skip
SOUNDS: Final = dict(
    pair.split("-")
    for pair in (
        "cow-moo dog-woof cat-meow duck-quack sheep-baa pig-oink horse-neigh lion-roar bee-buzz snake-hiss frog-croak "
        "owl-hoot rooster-cock-a-doodle-doo mouse-squeak wolf-howl crow-caw goat-bleat donkey-hee-haw bird-tweet"
    ).split()
    if pair.count("-") == 1
)
LEGS: Final = {
    "spider": 8, "dog": 4, "cat": 4, "ant": 6, "bee": 6, "bird": 2, "horse": 4, "octopus": 8, "human": 2, "cow": 4,
    "chicken": 2, "snake": 0, "fish": 0, "butterfly": 6, "elephant": 4,
}  # fmt: skip
PLAIN_FACTS: Final = (
    (("How many days are in a week?", "How many days does a week have?", "What is the number of days in a week?"), "7"),
    (("How many months are in a year?", "How many months does a year have?", "Number of months in a year?"), "12"),
    (("How many hours are in a day?", "How many hours does a day have?", "Number of hours in one day?"), "24"),
    (("How many minutes are in an hour?", "How many minutes does an hour have?", "Minutes in one hour?"), "60"),
    (("How many seconds are in a minute?", "How many seconds does a minute have?", "Seconds in a minute?"), "60"),
    (("How many days are in a year?", "How many days does a normal year have?", "Days in a year?"), "365"),
    (("How many days are in a leap year?", "How many days does a leap year have?"), "366"),
    (("How many weeks are in a year?", "How many weeks does a year have?"), "52"),
    (("How many sides does a triangle have?", "Number of sides of a triangle?"), "3"),
    (("How many sides does a square have?", "Number of sides of a square?"), "4"),
    (("How many sides does a pentagon have?", "Number of sides of a pentagon?"), "5"),
    (("How many sides does a hexagon have?", "Number of sides of a hexagon?"), "6"),
    (("How many letters are in the alphabet?", "How many letters does the English alphabet have?"), "26"),
    (("How many planets are in the solar system?", "How many planets orbit the sun?"), "8"),
    (("How many continents are there?", "How many continents does the Earth have?"), "7"),
    (("How many seasons are in a year?", "How many seasons are there?"), "4"),
    (("How many is a dozen?", "How many eggs are in a dozen?", "What number is a dozen?"), "12"),
    (("How many years are in a century?", "How long is a century in years?"), "100"),
    (("How many years are in a decade?", "How long is a decade in years?"), "10"),
    (("What is the first month of the year?", "Which month comes first in the year?"), "January"),
    (("What is the last month of the year?", "Which month comes last in the year?"), "December"),
    (("What is the shortest month?", "Which month has the fewest days?"), "February"),
    (("What is the largest planet?", "Which planet is the biggest?"), "Jupiter"),
    (("Which planet is closest to the sun?", "What is the planet nearest to the sun?"), "Mercury"),
    (("Which planet do we live on?", "What planet do humans live on?"), "Earth"),
    (("What is the largest animal?", "Which animal is the biggest in the world?"), "The blue whale"),
    (("What is the tallest animal?", "Which animal is the tallest?"), "The giraffe"),
    (("What is the fastest land animal?", "Which land animal runs fastest?"), "The cheetah"),
    (("What do bees make?", "What food do bees make?"), "Honey"),
    (("What do cows give us to drink?", "What do we drink that comes from cows?"), "Milk"),
    (("What is frozen water called?", "What do we call frozen water?"), "Ice"),
    (("What is a baby dog called?", "What do you call a young dog?"), "A puppy"),
    (("What is a baby cat called?", "What do you call a young cat?"), "A kitten"),
    (("What is a baby cow called?", "What do you call a young cow?"), "A calf"),
    (("What is a baby sheep called?", "What do you call a young sheep?"), "A lamb"),
    (("What colour do you get by mixing blue and yellow?", "What color do blue and yellow make?"), "Green"),
    (("What colour do you get by mixing red and yellow?", "What color do red and yellow make?"), "Orange"),
    (("What colour do you get by mixing red and blue?", "What color do red and blue make?"), "Purple"),
    (("What colour do you get by mixing red and white?", "What color do red and white make?"), "Pink"),
    (("What colour do you get by mixing black and white?", "What color do black and white make?"), "Grey"),
    (("What are the days of the week?", "Name the days of the week.", "List the days of the week."), ", ".join(WEEKDAYS)),
    (("What are the months of the year?", "Name the months of the year.", "List the months."), ", ".join(MONTHS)),
    (("What are the primary colours?", "Name the primary colors."), "Red, yellow, blue"),
    (("What are the four seasons?", "Name the seasons."), "Spring, summer, autumn, winter"),
    (("Recite the alphabet.", "Say the alphabet.", "What are the letters of the alphabet?"),
     ", ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")),
    (("Name three colors.", "List three colours.", "Tell me three colors."), "Red, green, blue"),
    (("What are the vowels?", "Name the vowels."), "a, e, i, o, u"),
)  # fmt: skip
MONTH_DAYS: Final = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))
ORDINALS: Final = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()

_CAPITAL: Final = (
    "What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?",
    "Tell me the capital of {c}.", "Name the capital of {c}.", "What is {p} capital?", "Capital of {c}?",
    "Do you know the capital of {c}?", "What is the capital city of {c}?", "Can you tell me the capital of {c}?",
    "{c}: what is its capital?", "I forgot the capital of {c}. What is it?", "Give me the capital of {c}.",
    "What is the name of the capital of {c}?", "The capital of {c} is", "Which city is {p} capital?",
    "Name {p} capital city.", "I am travelling to {c}. What is the capital there?", "what city is the capital of {c}",
    "Could you name the capital city of {c}?", "What's the capital city of {c}?", "the capital of {c} is what?",
    "In one word, what is the capital of {c}?", "Answer briefly: the capital of {c}?", "What city serves as the capital of {c}?",
    "Which city is the seat of government of {c}?", "country: {c}\ncapital:", "Please name the capital of {c}",
    "Geography quiz: the capital of {c}?", "Where is the government of {c}? Name the capital.",
)  # fmt: skip
_COUNTRY: Final = (
    "{a} is the capital of which country?", "Which country has {a} as its capital?", "What country is {a} the capital of?",
    "{a} is the capital of what country?", "Of which country is {a} the capital?", "Name the country whose capital is {a}.",
    "Tell me which country has the capital {a}.",
)  # fmt: skip
_COLOUR: Final = (
    "What color is {t}?", "What colour is {t}?", "Which color is {t}?", "Tell me the color of {t}.",
    "What is the color of {t}?", "What's the colour of {t}?", "What is the usual color of {t}?", "color of {t}?",
    "Name the colour of {t}.", "What color does {t} have?", "What colour is {t} usually?", "Do you know what color {t} is?",
    "Give me the color of {t}.", "In one word, what color is {t}?", "What color would you say {t} is?",
    "Can you tell me what colour {t} is?", "Which colour does {t} have?", "{t}: what color?", "{t} is what color?",
    "If I paint {t}, which color should I use?", "What color is {t} typically?", "Describe the color of {t} in one word.",
)  # fmt: skip
_OPPOSITE: Final = (
    'What is the opposite of "{w}"?', "What is the opposite of {w}?", "What's the opposite of {w}?", "Opposite of {w}?",
    "Name the opposite of {w}.", "Give me the opposite of '{w}'.", "Tell me the opposite of {w}.",
    "What is the antonym of {w}?", 'Give an antonym for "{w}".', "Which word means the opposite of {w}?",
    "What word is the opposite of '{w}'?", "Antonym of {w}?", "The opposite of {w} is", "If it is not {w}, what is the opposite?",
    "Can you tell me the opposite of the word {w}?", "I need the opposite of the word \"{w}\".", "{w} is the opposite of what?",
    "What is the contrary of {w}?", "find the opposite: {w}", "What's an antonym for {w}?", "State the opposite of {w}.",
    "The antonym of {w} is what?", "In one word, the opposite of {w}?", "opposite: {w}",
)  # fmt: skip
_AFTER: Final = (
    "What {u} comes after {x}?", "Which {u} comes after {x}?", "What is the {u} after {x}?", "What's the next {u} after {x}?",
    "Which {u} follows {x}?", "Name the {u} after {x}.", "What {u} follows {x}?", "Tell me the {u} that comes after {x}.",
    "{x} is followed by which {u}?", "What comes right after {x}?", "Which {u} is next after {x}?", "What {u} is after {x}?",
    "What {u} is it after {x}?", "Which {u} will it be after {x}?", "What {u} do we have after {x}?", "What comes after {x}?", "Which {u} comes next after {x}?", "After {x} comes which {u}?", "What comes next: {x}, ...?",
)  # fmt: skip
_BEFORE: Final = (
    "What {u} comes before {x}?", "Which {u} comes before {x}?", "What is the {u} before {x}?", "Name the {u} before {x}.",
    "Which {u} precedes {x}?", "What {u} is before {x}?", "Tell me the {u} that comes before {x}.", "What comes right before {x}?",
    "Which {u} is just before {x}?", "What's the {u} before {x}?", "What comes before {x}?", "{x} comes after which {u}?",
    "The {u} before {x} is", "Which {u} do we have before {x}?",
)  # fmt: skip
_TODAY: Final = (
    "If today is {x}, what day is {w}?", "Today is {x}. What day is {w}?", "It is {x} today. Which day will it be {w}?",
    "If today is {x}, which day is {w}?", "Suppose today is {x}. What day is {w}?", "today is {x}, so what is {w}?",
    "Given that today is {x}, what is {w}?",
)  # fmt: skip


def capital(src: Source) -> Turn:
    country = src.pick(WELL_KNOWN) if src.chance(0.35) else src.pick(list(CAPITALS))
    city = CAPITALS[country]
    if src.chance(0.12):
        country = next(c for c in CAPITALS if CAPITALS[c] == city)
        name = country.removeprefix("the ")
        return Turn(
            src.ask(_COUNTRY, a=city), _sentence(country), f"{city} is the capital of {country}.", "contains", (name,)
        )
    if src.chance(0.08):
        right = src.chance(0.5)
        guess = city if right else src.pick([c for c in CAPITALS.values() if c != city])
        user = src.ask(
            ("Is {g} the capital of {c}?", "Is the capital of {c} {g}?", "True or false: {g} is the capital of {c}.",
             "Would you say that {g} is the capital of {c}?", "{g} is the capital of {c}, right?"), g=guess, c=country,
        )  # fmt: skip
        if user.lower().find("true or false") >= 0:
            answer = "True." if right else f"False. The capital of {country} is {city}."
        else:
            answer = "Yes." if right else f"No. The capital of {country} is {city}."
        return Turn(user, answer, f"The capital of {country} is {city}.")
    possessive = country + ("'" if country.endswith("s") else "'s")
    if src.chance(0.02):
        nowhere = src.coined(2, 3).capitalize()
        return Turn(
            src.ask(_CAPITAL, c=nowhere, p=nowhere + "'s"), "I do not know that country.", f"I do not know {nowhere}."
        )
    user = src.ask(_CAPITAL, c=country, p=possessive)
    if src.chance(0.06):
        return Turn(user + src.pick((" Answer in a full sentence.", " Use a full sentence.", " Reply with a sentence.")),
                    f"The capital of {country} is {city}.", f"The capital of {country} is {city}.")  # fmt: skip
    if country.startswith("the ") and src.chance(0.4):
        user = user.replace("the " + country[4:], country[4:])
    return Turn(user, _sentence(city), f"The user asks for the capital of {country}. It is {city}.")


def colour(src: Source) -> Turn:
    thing = src.pick(list(COLOUR_OF))
    shown = thing
    answer = COLOUR_OF[thing]
    user = src.ask(_COLOUR, t=shown)
    if src.chance(0.1):
        right = src.chance(0.5)
        guess = (
            answer
            if right
            else src.pick(
                [c for c in ("red", "green", "blue", "yellow", "black", "white", "pink", "orange") if c != answer]
            )
        )
        user = src.ask(
            (
                "Is {t} {c}?",
                "Is it true that {t} is {c}?",
                "Would you say {t} is {c}?",
                "{t} is {c}, right?",
                "Is the color of {t} {c}?",
            ),
            t=thing,
            c=guess,
        )
        return Turn(
            user, "Yes." if right else f"No. The color of {thing} is {answer}.", f"The color of {thing} is {answer}."
        )
    if thing.startswith(("a ", "an ")) and src.chance(0.3):
        noun = thing.split(" ", 1)[1]
        if noun[-1] not in "ysho" and " in " not in noun:
            user = src.ask(
                ("What color are {t}s?", "What colour are {t}s?", "Which color are {t}s?", "What is the color of {t}s?",
                 "Tell me what color {t}s are.", "What colour do {t}s have?", "What color are most {t}s?"), t=noun,
            )  # fmt: skip
    return Turn(user, _sentence(answer), f"The color of {thing} is {answer}.")


def opposite(src: Source) -> Turn:
    word = src.pick(list(OPPOSITE_OF))
    shown = word.upper() if src.chance(0.03) else word.capitalize() if src.chance(0.08) else word
    answer = OPPOSITE_OF[word]
    return Turn(src.ask(_OPPOSITE, w=shown), _sentence(answer), f"The opposite of {word} is {answer}.")


def day(src: Source) -> Turn:
    kind = src.integer(0, 9)
    series, unit = (WEEKDAYS, "day") if src.chance(0.55) else (MONTHS, "month")
    index = src.integer(0, len(series) - 1)
    here, after, before = series[index], series[(index + 1) % len(series)], series[index - 1]
    shown = here.lower() if src.chance(0.1) else here
    if kind < 3:
        return Turn(src.ask(_AFTER, u=unit, x=shown), after + ".", f"After {here} comes {after}.")
    if kind < 6:
        return Turn(src.ask(_BEFORE, u=unit, x=shown), before + ".", f"Before {here} comes {before}.")
    if kind == 6:
        index = src.integer(0, 6)
        steps, phrase = src.pick(
            ((1, "tomorrow"), (-1, "yesterday"), (2, "the day after tomorrow"), (-2, "the day before yesterday"),
             (2, "in two days"), (3, "in three days"), (3, "in 3 days"), (7, "in a week"), (2, "in 2 days"))
        )  # fmt: skip
        answer = WEEKDAYS[(index + steps) % 7]
        return Turn(
            src.ask(_TODAY, x=WEEKDAYS[index], w=phrase),
            answer + ".",
            f"Today is {WEEKDAYS[index]}, so it is {answer}.",
        )
    if kind == 7:
        user = src.ask(
            ("What is the {o} {u} of the {s}?", "Which {u} is the {o} of the {s}?", "Name the {o} {u} of the {s}.",
             "What's the {o} {u} of the {s}?", "Tell me the {o} {u} of the {s}.", "The {o} {u} of the {s} is",
             "Which is the {o} {u} of the {s}?"),
            o=ORDINALS[index], u=unit, s="week" if unit == "day" else "year",
        )  # fmt: skip
        return Turn(user, here + ".", f"The {ORDINALS[index]} {unit} is {here}.")
    if kind == 8:
        name = src.pick(MONTHS)
        user = src.ask(
            ("How many days does {m} have?", "How many days are in {m}?", "How many days are there in {m}?",
             "How long is {m} in days?", "Number of days in {m}?", "What is the number of days in {m}?",
             "Tell me how many days {m} has."), m=name,
        )  # fmt: skip
        return Turn(user, f"{MONTH_DAYS[name]}", f"{name} has {MONTH_DAYS[name]} days.")
    other = series[(index + 2) % len(series)]
    user = src.ask(
        ("What {u} is between {a} and {b}?", "Which {u} comes between {a} and {b}?", "Name the {u} between {a} and {b}.",
         "What comes between {a} and {b}?", "Which {u} lies between {a} and {b}?", "The {u} between {a} and {b} is"),
        u=unit, a=here, b=other,
    )  # fmt: skip
    return Turn(user, after + ".", f"Between {here} and {other} is {after}.")


def plain(src: Source) -> Turn:
    kind = src.integer(0, 9)
    if kind == 0:
        animal = src.pick(list(SOUNDS))
        templates = (
            "What sound does a {a} make?", "What does a {a} say?", "Which sound does a {a} make?",
            "What noise does a {a} make?", "Tell me the sound of a {a}.", "How does a {a} sound?",
        )  # fmt: skip
        return Turn(src.ask(templates, a=animal), _sentence(SOUNDS[animal]), f"A {animal} says {SOUNDS[animal]}.")
    if kind == 1:
        animal = src.pick(list(LEGS))
        templates = (
            "How many legs does a {a} have?", "How many legs has a {a}?", "Number of legs of a {a}?",
            "Tell me how many legs a {a} has.", "What is the number of legs of a {a}?", "How many legs are on a {a}?",
        )  # fmt: skip
        return Turn(src.ask(templates, a=animal), str(LEGS[animal]), f"A {animal} has {LEGS[animal]} legs.")
    questions, answer = src.pick(PLAIN_FACTS)
    return Turn(
        src.ask(questions), answer if answer.isdigit() or "," in answer else answer + ".", f"The answer is {answer}."
    )


def arithmetic(src: Source) -> Turn:
    kind = src.weighted((("+", 4), ("-", 4), ("*", 3), ("/", 1), ("words", 1), ("story", 1.5)))
    if kind == "story":
        return _story(src)
    high = src.pick((10, 20, 99, 99, 99, 999))
    a, b = src.integer(0, high), src.integer(0, src.pick((high, 9, high)))
    if src.chance(0.1):
        a = src.pick((100, 200, 300, 500, 1000, 50, 10, 20, 25, 30, 60, 90))
    if kind == "words":
        a, b = src.integer(0, 20), src.integer(0, 20)
        kind = src.pick("+-")
    elif kind == "*":
        a, b = (
            (src.integer(0, 12), src.integer(0, 12)) if src.chance(0.75) else (src.integer(10, 99), src.integer(2, 9))
        )
        if src.chance(0.3):
            a, b = b, a
    elif kind == "/":
        b = src.integer(1, 12)
        a = b * src.integer(0, 12)
    if kind == "-" and a < b and src.chance(0.8):
        a, b = b, a
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[kind]
    left, right = (NUMBER_WORDS[n] if n <= 20 and src.chance(0.12) else str(n) for n in (a, b))
    spoken = src.pick(
        {"+": ("plus", "+", "+", "+"), "-": ("minus", "-", "-", "-"), "*": ("times", "*", "x", "×", "multiplied by"),
         "/": ("divided by", "/", "÷")}[kind]
    )  # fmt: skip
    gap = "" if spoken in "+-*x/×÷" and src.chance(0.2) else " "
    expression = f"{left}{gap}{spoken}{gap}{right}"
    templates = [
        "What is {e}?", "What's {e}?", "Calculate {e}.", "Compute {e}", "{e} = ?", "{e}", "How much is {e}?", "{e}=",
        "Tell me what {e} is.", "Solve {e}.", "What does {e} equal?", "Work out {e}.", "Can you calculate {e}?",
        "What is the result of {e}?", "{e}?", "Please compute {e}.", "Do the math: {e}", "I need to know {e}.", "math: {e}",
        "Evaluate {e}.", "what do you get for {e}?", "Give me the result of {e}.", "{e} equals what?", "{e} is",
    ]  # fmt: skip
    if kind == "+":
        templates += ["Add {l} and {r}.", "What is the sum of {l} and {r}?", "Sum {l} and {r}", "What do you get when you add {l} and {r}?",
                      "Add {l} to {r}.", "Give me the sum of {l} and {r}."]  # fmt: skip
    elif kind == "-":
        templates += ["Subtract {r} from {l}.", "What is the difference between {l} and {r}?", "Take {r} away from {l}.",
                      "What is {l} less {r}?", "What is left if you take {r} from {l}?", "{l} take away {r}?"]  # fmt: skip
        if a < b:
            templates = templates[:24]
    elif kind == "*":
        templates += ["Multiply {l} by {r}.", "What is the product of {l} and {r}?", "Multiply {l} and {r}.",
                      "{l} times {r}?", "Product of {l} and {r}?", "How much is {l} multiplied by {r}?"]  # fmt: skip
    else:
        templates += ["Divide {l} by {r}.", "How many times does {r} go into {l}?", "What is {l} split by {r}?"]
    sign = {"*": "*", "/": "/"}.get(kind, kind)
    return Turn(src.ask(templates, e=expression, l=left, r=right), str(result), f"{a} {sign} {b} = {result}.")


def _story(src: Source) -> Turn:
    name, thing = src.name(), src.thing()
    plural = thing + ("" if thing.endswith("s") else "s")
    a, b = src.integer(2, 30), src.integer(1, 20)
    who = src.pick(("I have", f"{name} has", "You have", "There are"))
    ask_more = src.pick(("How many are there now?", "How many is that in total?", "How many altogether?", "What is the total?",
                         "How many does that make?", f"How many {plural} are there?"))  # fmt: skip
    if src.chance(0.55):
        gain = src.pick((f"buys {b} more", f"gets {b} more", f"finds {b} more", f"is given {b} more"))
        text = {"I have": f"I have {a} {plural} and get {b} more.", "There are": f"There are {a} {plural}. Then {b} more arrive.",
                "You have": f"You have {a} {plural} and I give you {b} more."}.get(who, f"{name} has {a} {plural} and {gain}.")  # fmt: skip
        return Turn(f"{text} {ask_more}", str(a + b), f"{a} + {b} = {a + b}.")
    a, b = max(a, b), min(a, b)
    loss = src.pick((f"gives away {b}", f"loses {b}", f"sells {b}", f"eats {b}", f"breaks {b}"))
    text = {"I have": f"I have {a} {plural} and lose {b}.", "There are": f"There are {a} {plural}. Then {b} are taken away.",
            "You have": f"You have {a} {plural} and give me {b}."}.get(who, f"{name} has {a} {plural} and {loss}.")  # fmt: skip
    left = src.pick(
        (
            "How many are left?",
            "How many remain?",
            "How many are left over?",
            "What is left?",
            f"How many {plural} are left?",
        )
    )
    return Turn(f"{text} {left}", str(a - b), f"{a} - {b} = {a - b}.")


def counting(src: Source) -> Turn:
    kind = src.weighted(
        (("up", 4), ("down", 2), ("step", 1.5), ("words", 3), ("letters", 3), ("items", 2), ("which", 1))
    )
    if kind in ("up", "down"):
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
    if kind == "step":
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
    if kind == "words":
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
    if kind == "letters":
        word = src.word()
        user = src.ask(
            ("How many letters are in {w}?", 'How many letters are in the word "{w}"?', "How many letters does {w} have?",
             "Count the letters in '{w}'.", "Number of letters in {w}?", "How many letters has the word {w}?",
             "How long is the word {w}?", "Tell me how many letters \"{w}\" has.", "Count the letters: {w}",
             "How many characters are in {w}?", "What is the length of the word '{w}'?", "letter count of {w}"), w=word,
        )  # fmt: skip
        return Turn(user, str(len(word)), f"{'-'.join(word)} has {len(word)} letters.")
    if kind == "items":
        words = src.words(2, 8)
        listed = ", ".join(words) if src.chance(0.5) else ", ".join(words[:-1]) + " and " + words[-1]
        user = src.ask(
            ("How many items are in this list: {t}", "How many things are in the list {t}?", "Count the items: {t}",
             "How many items are here: {t}?", "Count the elements of this list: {t}", "Number of items in {t}?",
             "How many entries does this list have: {t}", "I bought {t}. How many things did I buy?"), t=listed,
        )  # fmt: skip
        return Turn(user, str(len(words)), "I count: " + " ".join(f"{i} {w}" for i, w in enumerate(words, 1)) + ".")
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


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else text + "."


SKILLS: Final = (
    (capital, 4.0), (colour, 2.0), (opposite, 3.0), (day, 2.0), (plain, 1.0), (arithmetic, 11.0), (counting, 6.0), (spelling, 5.0),
)  # fmt: skip
