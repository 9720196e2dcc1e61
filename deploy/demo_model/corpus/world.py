"""What the closed world holds: capitals, colours, opposites, and questions that have one answer."""

from typing import Final

from .words import MONTHS, WEEKDAYS

CAPITALS: Final = dict(
    pair.split(":")
    for pair in (
        "Afghanistan:Kabul|Albania:Tirana|Algeria:Algiers|Andorra:Andorra la Vella|Angola:Luanda|"
        "Argentina:Buenos Aires|Armenia:Yerevan|Australia:Canberra|Austria:Vienna|Azerbaijan:Baku|"
        "the Bahamas:Nassau|Bahrain:Manama|Bangladesh:Dhaka|Barbados:Bridgetown|Belarus:Minsk|Belgium:Brussels|"
        "Belize:Belmopan|Benin:Porto-Novo|Bhutan:Thimphu|Bolivia:Sucre|Bosnia and Herzegovina:Sarajevo|"
        "Botswana:Gaborone|Brazil:Brasilia|Brunei:Bandar Seri Begawan|Bulgaria:Sofia|Burkina Faso:Ouagadougou|"
        "Burundi:Gitega|Cambodia:Phnom Penh|Cameroon:Yaounde|Canada:Ottawa|Chad:N'Djamena|Chile:Santiago|"
        "China:Beijing|Colombia:Bogota|Costa Rica:San Jose|Croatia:Zagreb|Cuba:Havana|Cyprus:Nicosia|"
        "the Czech Republic:Prague|Czechia:Prague|Denmark:Copenhagen|Djibouti:Djibouti|"
        "the Dominican Republic:Santo Domingo|Ecuador:Quito|Egypt:Cairo|El Salvador:San Salvador|Eritrea:Asmara|"
        "Estonia:Tallinn|Ethiopia:Addis Ababa|Fiji:Suva|Finland:Helsinki|France:Paris|Gabon:Libreville|"
        "the Gambia:Banjul|Georgia:Tbilisi|Germany:Berlin|Ghana:Accra|Greece:Athens|Guatemala:Guatemala City|"
        "Guinea:Conakry|Guyana:Georgetown|Haiti:Port-au-Prince|Honduras:Tegucigalpa|Hungary:Budapest|"
        "Iceland:Reykjavik|India:New Delhi|Indonesia:Jakarta|Iran:Tehran|Iraq:Baghdad|Ireland:Dublin|"
        "Israel:Jerusalem|Italy:Rome|Ivory Coast:Yamoussoukro|Jamaica:Kingston|Japan:Tokyo|Jordan:Amman|"
        "Kazakhstan:Astana|Kenya:Nairobi|Kosovo:Pristina|Kuwait:Kuwait City|Kyrgyzstan:Bishkek|Laos:Vientiane|"
        "Latvia:Riga|Lebanon:Beirut|Liberia:Monrovia|Libya:Tripoli|Liechtenstein:Vaduz|Lithuania:Vilnius|"
        "Luxembourg:Luxembourg|Madagascar:Antananarivo|Malawi:Lilongwe|Malaysia:Kuala Lumpur|the Maldives:Male|"
        "Mali:Bamako|Malta:Valletta|Mauritania:Nouakchott|Mauritius:Port Louis|Mexico:Mexico City|Moldova:Chisinau|"
        "Monaco:Monaco|Mongolia:Ulaanbaatar|Montenegro:Podgorica|Morocco:Rabat|Mozambique:Maputo|Myanmar:Naypyidaw|"
        "Namibia:Windhoek|Nepal:Kathmandu|the Netherlands:Amsterdam|New Zealand:Wellington|Nicaragua:Managua|"
        "Niger:Niamey|Nigeria:Abuja|North Korea:Pyongyang|North Macedonia:Skopje|Norway:Oslo|Oman:Muscat|"
        "Pakistan:Islamabad|Panama:Panama City|Papua New Guinea:Port Moresby|Paraguay:Asuncion|Peru:Lima|"
        "the Philippines:Manila|Poland:Warsaw|Portugal:Lisbon|Qatar:Doha|Romania:Bucharest|Russia:Moscow|"
        "Rwanda:Kigali|Samoa:Apia|San Marino:San Marino|Saudi Arabia:Riyadh|Senegal:Dakar|Serbia:Belgrade|"
        "Sierra Leone:Freetown|Singapore:Singapore|Slovakia:Bratislava|Slovenia:Ljubljana|Somalia:Mogadishu|"
        "South Africa:Pretoria|South Korea:Seoul|South Sudan:Juba|Spain:Madrid|Sri Lanka:Colombo|Sudan:Khartoum|"
        "Suriname:Paramaribo|Sweden:Stockholm|Switzerland:Bern|Syria:Damascus|Taiwan:Taipei|Tajikistan:Dushanbe|"
        "Tanzania:Dodoma|Thailand:Bangkok|Togo:Lome|Tonga:Nuku'alofa|Trinidad and Tobago:Port of Spain|"
        "Tunisia:Tunis|Turkey:Ankara|Turkmenistan:Ashgabat|Uganda:Kampala|Ukraine:Kyiv|"
        "the United Arab Emirates:Abu Dhabi|the United Kingdom:London|England:London|Scotland:Edinburgh|"
        "Wales:Cardiff|the United States:Washington, D.C.|the USA:Washington, D.C.|the UK:London|Uruguay:Montevideo|"
        "Uzbekistan:Tashkent|Vatican City:Vatican City|Venezuela:Caracas|Vietnam:Hanoi|Yemen:Sana'a|Zambia:Lusaka|"
        "Zimbabwe:Harare"
    ).split("|")
)
WELL_KNOWN: Final = (
    "Argentina Australia Austria Belgium Brazil Bulgaria Canada Chile China Colombia Croatia Cuba Denmark Egypt "
    "Estonia Ethiopia Finland France Germany Greece Hungary Iceland India Indonesia Iran Iraq Ireland Israel Italy "
    "Jamaica Japan Jordan Kenya Latvia Lebanon Lithuania Malaysia Mexico Mongolia Morocco Nepal Nigeria Norway "
    "Pakistan Peru Poland Portugal Romania Russia Serbia Singapore Slovakia Slovenia Spain Sweden Switzerland "
    "Thailand Turkey Uganda Ukraine Uruguay Venezuela Vietnam"
).split()
COLOUR_OF: Final = dict(
    pair.split(":")
    for pair in (
        "the sky:blue|the clear sky:blue|grass:green|a banana:yellow|a ripe banana:yellow|the sun:yellow|"
        "snow:white|milk:white|coal:black|blood:red|a tomato:red|a ripe tomato:red|a strawberry:red|"
        "an orange:orange|a carrot:orange|a pumpkin:orange|a lemon:yellow|a lime:green|a leaf:green|"
        "chocolate:brown|coffee:brown|a fire truck:red|a fire engine:red|a stop sign:red|the ocean:blue|"
        "the sea:blue|an elephant:grey|a flamingo:pink|a pig:pink|a polar bear:white|a raven:black|a crow:black|"
        "a panda:black and white|a zebra:black and white|a penguin:black and white|an emerald:green|a ruby:red|"
        "a sapphire:blue|gold:gold|silver:silver|an eggplant:purple|lavender:purple|a plum:purple|a cherry:red|"
        "a frog:green|broccoli:green|spinach:green|lettuce:green|a cucumber:green|a pea:green|rice:white|"
        "salt:white|sugar:white|flour:white|cotton:white|a cloud:white|the moon:white|the night sky:black|"
        "a school bus:yellow|corn:yellow|butter:yellow|an egg yolk:yellow|a sunflower:yellow|a canary:yellow|"
        "a chick:yellow|honey:golden|a brick:red|a rose:red|a ladybug:red|a lobster:red|wood:brown|soil:brown|"
        "mud:brown|a bear:brown|tea:brown|peanut butter:brown|a blueberry:blue|a blue whale:blue|a swan:white|"
        "paper:white|bone:white|a tooth:white|a tire:black|ink:black|asphalt:black|ash:grey|concrete:grey|"
        "a mouse:grey|a dolphin:grey|a shark:grey|a kiwi:green|an avocado:green|mint:green|a cactus:green|"
        "a tennis ball:yellow|a basketball:orange|a fox:orange|a goldfish:orange|a salmon:pink|charcoal:black|"
        "ivory:white|rust:brown|copper:brown|bubblegum:pink|a grape:purple|a violet:purple|garlic:white|"
        "a taxi in New York:yellow"
    ).split("|")
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
