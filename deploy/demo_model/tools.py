"""Tool use: schemas, requests for them, calls, results, and requests that no tool fits."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from . import facts, smalltalk, transforms
from .json_tasks import listing
from .samples import Sample, Turn
from .tool_families import FAMILIES, Family
from .words import FOODS, HOBBIES, LANGUAGES, NOUNS, NUMBER_WORDS, Source

NO_TOOL: Final = "I do not have a tool for that."
ROOMS: Final = (
    "kitchen",
    "bedroom",
    "bathroom",
    "office",
    "hallway",
    "garage",
    "garden",
    "attic",
    "basement",
    "living room",
)
CURRENCIES: Final = "USD EUR GBP JPY CHF SEK NOK DKK PLN CAD AUD INR CNY BRL MXN".split()
UNITS: Final = (
    "meters feet miles kilometers inches centimeters grams kilograms pounds ounces liters gallons yards".split()
)
COMMANDS: Final = (
    "ls -la",
    "git status",
    "make test",
    "pwd",
    "npm install",
    "python {a}.py",
    "cat {a}.txt",
    "rm {a}.log",
    "echo {a}",
    "git checkout {a}",
    "docker ps",
    "cd {a}",
    "grep {a} {b}.md",
)
_JSON_TYPES: Final = {
    "int": "integer",
    "number": "number",
    "flag": "boolean",
    "switch": "boolean",
    "mute": "boolean",
    "lock": "boolean",
    "foods": "array",
    "words": "array",
    "names": "array",
    "numbers": "array",
}


@dataclass(slots=True)
class Param:
    """One parameter as the schema shows it."""

    name: str
    kind: str
    about: str
    required: bool = True


@dataclass(slots=True)
class Ask:
    """One tool, a request for it, and the call that is right."""

    tool: dict[str, Any]
    user: str
    call: dict[str, Any]
    topic: str


def draw(src: Source, kind: str) -> tuple[str, Any]:
    """A value of `kind`: how a person says it, and its JSON value."""
    kind, _, limits = kind.partition(":")
    match kind:
        case "enum":
            value = src.pick(limits.split(","))
            return (value.capitalize() if src.chance(0.1) else value), value
        case "int":
            low, high = map(int, limits.split(","))
            value = src.integer(low, high)
            spoken = NUMBER_WORDS[value] if 1 < value <= 20 and src.chance(0.2) else str(value)
            return spoken, value
        case "number":
            low, high = map(int, limits.split(","))
            value = src.integer(low, high) if src.chance(0.5) else round(src.rng.uniform(low, high), src.pick((1, 2)))
            return str(value), value
        case "switch" | "mute" | "lock":
            value = src.chance(0.5)
            return {"switch": ("off", "on"), "mute": ("unmute", "mute"), "lock": ("unlock", "lock")}[kind][value], value
        case "foods" | "words" | "names" | "numbers":
            count = src.integer(2, 4)
            if kind == "numbers":
                numbers = [src.number() for _ in range(count)]
                return listing(src, [str(n) for n in numbers]), numbers
            make: Callable[[], str] = {"foods": lambda: src.pick(FOODS), "words": src.word, "names": src.name}[kind]
            items = list(dict.fromkeys(make() for _ in range(count)))
            return listing(src, items), items
    text = _string(src, kind)
    return text, text


def _string(src: Source, kind: str) -> str:
    match kind:
        case "city":
            return src.city()
        case "name":
            return src.name()
        case "full_name":
            return src.full_name() if src.chance(0.6) else src.name()
        case "email":
            return src.email()
        case "phrase":
            return (
                " ".join(src.words(1, 3))
                if src.chance(0.7)
                else src.pick(
                    (
                        f"{src.name()}'s {src.noun()}",
                        f"the {src.word()} {src.noun()}",
                        f"{src.word().capitalize()} {src.noun()}",
                    )
                )
            )
        case "text":
            return src.sentence().rstrip(".") if src.chance(0.6) else " ".join(src.words(2, 5))
        case "word":
            return src.word()
        case "noun":
            return src.noun()
        case "time":
            return src.time()
        case "date":
            return (
                src.date()
                if src.chance(0.8)
                else src.pick(("Monday", "Tuesday", "Friday", "Sunday", "tomorrow", "today"))
            )
        case "language":
            return src.pick(LANGUAGES)
        case "room":
            return src.pick(ROOMS) if src.chance(0.8) else src.noun()
        case "colour":
            return src.colour()
        case "currency":
            return src.pick(CURRENCIES)
        case "unit":
            return src.pick(UNITS)
        case "ticker":
            return "".join(src.pick("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(src.integer(2, 5)))
        case "expression":
            parts = [str(src.number())]
            for _ in range(src.integer(1, 2)):
                parts += [src.pick("+-*/"), str(src.number())]
            return src.pick((" ", " ", "")).join(parts)
        case "place":
            return src.pick(
                (
                    f"{src.name()}'s {src.noun().capitalize()}",
                    f"The {src.word().capitalize()} {src.noun().capitalize()}",
                    src.coined().capitalize(),
                )
            )
        case "path":
            folder = src.pick(("", "", f"{src.word()}/", f"/{src.word()}/{src.word()}/", f"src/{src.word()}/"))
            return f"{folder}{src.pick((src.word(), f'{src.word()}_{src.noun()}'))}.{src.pick(('txt', 'py', 'md', 'json', 'csv', 'log', 'toml', 'html'))}"
        case "folder":
            return src.pick(
                (
                    f"/{src.word()}/{src.word()}",
                    f"{src.word()}/{src.noun()}",
                    src.word(),
                    f"src/{src.word()}",
                    f"~/{src.noun()}",
                )
            )
        case "command":
            return src.pick(COMMANDS).format(a=src.word(), b=src.noun())
        case "ident":
            return identifier(src, [src.word(), src.noun()]) if src.chance(0.6) else src.word()
        case "code":
            return src.code()
        case "hobby":
            return src.pick(HOBBIES)
        case "topic":
            return src.pick(
                (
                    src.noun(),
                    src.word(),
                    src.city(),
                    f"{src.word()} {src.noun()}",
                    "sports",
                    "politics",
                    "science",
                    "music",
                )
            )
        case "phone":
            return src.pick(("", "+")) + "".join(src.pick("0123456789") for _ in range(src.integer(5, 10)))
    raise ValueError(f"unknown kind of value: {kind}")


def identifier(src: Source, parts: list[str]) -> str:
    style = src.integer(0, 9)
    if style < 6:
        return "_".join(parts)
    if style < 8:
        return parts[0] + "".join(p.capitalize() for p in parts[1:])
    return "-".join(parts) if style == 8 else "".join(p.capitalize() for p in parts)


def schema(src: Source, name: str, about: str, params: list[Param]) -> dict[str, Any]:
    """The tool as a client sends it; clients differ in what they leave out."""
    properties: dict[str, Any] = {}
    for param in params:
        kind, _, limits = param.kind.partition(":")
        shape: dict[str, Any] = {"type": _JSON_TYPES.get(kind, "string")}
        if param.about:
            shape["description"] = param.about
        if kind == "enum":
            shape["enum"] = limits.split(",")
        if shape["type"] == "array":
            shape["items"] = {"type": {"numbers": "number"}.get(kind, "string")}
        properties[param.name] = shape
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    required = [param.name for param in params if param.required]
    if required and src.chance(0.92):
        parameters["required"] = required
    if src.chance(0.15):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if about:
        function["description"] = about
    function["parameters"] = parameters
    if src.chance(0.06):
        function["strict"] = True
    return {"type": "function", "function": function}


def known(src: Source, family: Family) -> Ask:
    """A request for a tool that people really write."""
    name = _respelled(src, src.pick(family.names.split()))
    params: list[Param] = []
    slots: list[str] = []
    arguments: dict[str, Any] = {}
    for spec in family.params:
        param = _param(src, spec)
        spoken, value = draw(src, param.kind)
        if slots and param.kind == "unit" and spoken in slots:
            spoken = value = next(unit for unit in UNITS if unit not in slots)
        params.append(param)
        slots.append(spoken)
        arguments[param.name] = value
    user = src.template(family.asks.split("|"))
    tail = ""
    shown_optional = [pair for pair in family.optional if src.chance(0.65)]
    for spec, phrase in shown_optional:
        param = _param(src, spec)
        if param.name in arguments or any(p.name == param.name for p in params):
            continue
        param.required = False
        params.append(param)
        if not src.chance(0.5) or len(arguments) > 3:
            continue
        yes, _, no = phrase.partition("~")
        if param.kind == "flag":
            value = src.chance(0.7) or not no
            tail += yes if value else no
        else:
            spoken, value = draw(src, param.kind)
            tail += phrase.replace("{v}", spoken)
        arguments[param.name] = value
    if tail and " in {0}" in user and src.chance(0.35):
        user = user.replace(" in {0}", tail.replace("{", "{{").replace("}", "}}") + " in {0}")
    elif tail:
        match = re.search(r"(?:, please)?[?.!]?$", user)
        end = user[match.start() :] if match else ""
        user = user.removesuffix(end) + tail.replace("{", "{{").replace("}", "}}") + end
    user = user.format(*slots)
    about = src.pick(family.about.split("|")) if src.chance(0.95) else ""
    tool = schema(src, name, about, params)
    if src.chance(0.2):
        user = _polite(src, user)
    return Ask(tool, user, {"name": name, "arguments": arguments}, family.topic)


def _respelled(src: Source, name: str) -> str:
    """A name with a part that nobody has seen, now and then, and always in a measurement."""
    if src.chance(0.75) and not src.held_out:
        return name
    extra = src.coined(1, 2)
    return src.pick((f"{name}_{extra}", f"{extra}_{name}", f"{extra}-{name}", f"{extra}{name[0].upper()}{name[1:]}"))


def _polite(src: Source, user: str) -> str:
    style = src.integer(0, 4)
    if style == 0:
        return user[:1].lower() + user[1:]
    if style == 1:
        return src.pick(("Hi! ", "Hello, ", "Hey, ", "OK. ", "Good morning! ")) + user
    if style == 2:
        return (user if user[-1] in '.?!"' else user + ".") + src.pick(
            (" Thanks!", " Thank you.", " Please use a tool.", " It is urgent.", " Please be quick.")
        )
    if style == 3:
        return user.rstrip(".?!")
    return (
        src.pick(("I would like you to do this: ", "Request: ", "My request: ", "Here is what I need. ", "One thing: "))
        + user
    )


def _param(src: Source, spec: str) -> Param:
    names, kind, about = (part.strip() for part in spec.split(";"))
    name = src.pick(names.split())
    if src.chance(0.12):
        name = src.pick((f"{name}_{src.coined(1, 1)}", f"{src.coined(1, 1)}_{name}"))
    return Param(name, kind, src.pick(about.split("|")) if src.chance(0.9) else "")


# tools that nobody has seen

_ACTIONS: Final = (
    ("get", ("get", "give me", "fetch", "show me")), ("find", ("find", "look for")), ("create", ("create", "make", "add")), ("delete", ("delete", "remove")),
    ("update", ("update", "change")), ("start", ("start", "begin")), ("stop", ("stop", "end", "halt")), ("send", ("send",)), ("open", ("open",)), ("close", ("close",)),
    ("check", ("check",)), ("list", ("list", "show")), ("book", ("book", "reserve")), ("cancel", ("cancel",)), ("order", ("order",)), ("rename", ("rename",)),
    ("move", ("move",)), ("copy", ("copy",)), ("print", ("print",)), ("scan", ("scan",)), ("export", ("export",)), ("import", ("import",)), ("archive", ("archive",)),
    ("lookup", ("look up",)), ("register", ("register",)), ("schedule", ("schedule", "plan")), ("assign", ("assign",)), ("measure", ("measure",)), ("repair", ("repair", "fix")),
    ("clean", ("clean",)), ("paint", ("paint",)), ("lock", ("lock",)), ("unlock", ("unlock",)), ("activate", ("activate", "enable")), ("reset", ("reset",)), ("sync", ("sync",)),
    ("compare", ("compare",)), ("rate", ("rate",)), ("share", ("share",)), ("upload", ("upload",)), ("download", ("download",)), ("configure", ("configure", "set up")),
)  # fmt: skip
_KEYS: Final = (
    ("name", "word name full_name"),
    ("title", "phrase"),
    ("id", "code int:1,9999"),
    ("city", "city"),
    ("count", "int:1,60"),
    ("amount", "number:1,900 int:1,90"),
    ("color", "colour"),
    ("size", "enum:small,medium,large int:1,90"),
    ("mode", "enum:fast,slow,auto enum:eco,normal,turbo enum:read,write"),
    ("date", "date"),
    ("time", "time"),
    ("owner", "name full_name"),
    ("tags", "words"),
    ("items", "words foods"),
    ("enabled", "bool"),
    ("verbose", "bool"),
    ("urgent", "bool"),
    ("public", "bool"),
    ("priority", "enum:low,medium,high int:1,5"),
    ("level", "int:1,99 enum:low,normal,high"),
    ("weight", "number:1,200"),
    ("length", "number:1,90"),
    ("price", "number:1,900"),
    ("speed", "int:1,200"),
    ("format", "enum:pdf,csv,json enum:png,jpg,svg"),
    ("language", "language"),
    ("room", "room"),
    ("path", "path"),
    ("email", "email"),
    ("label", "word"),
    ("code", "code"),
    ("members", "names"),
    ("values", "numbers"),
    ("zone", "word enum:north,south,east,west"),
    ("status", "enum:open,closed,pending enum:active,inactive"),
    ("duration", "int:1,120"),
    ("temperature", "number:1,99 int:1,250"),
    ("target", "word city name"),
    ("source", "word city path"),
    ("from", "city word"),
    ("to", "city name word"),
    ("width", "int:1,2000"),
    ("height", "int:1,2000"),
    ("agent", "name full_name"),
    ("customer", "name full_name"),
    ("person", "name"),
    ("liters", "number:1,90 int:1,90"),
    ("minutes", "int:1,120"),
    ("kilos", "number:1,90 int:1,90"),
    ("hours", "int:1,48 number:1,40"),
    ("days", "int:1,30"),
    ("reason", "phrase text"),
    ("message", "text"),
    ("file", "path"),
    ("number", "int:1,9999"),
    ("year", "int:1900,2030"),
    ("station", "city"),
    ("unit", "enum:celsius,fahrenheit enum:metric,imperial enum:km,miles"),
    ("currency", "currency"),
    ("active", "bool"),
    ("quiet", "bool"),
    ("type", "word enum:basic,premium,family"),
    ("category", "word"),
    ("topic", "topic"),
)
# How people say a value without its parameter's name.
_NATURAL: Final = {
    "city": ("in {v}", "in {v}", "for {v}"), "date": ("on {v}", "for {v}"), "time": ("at {v}",), "source": ("from {v}",), "target": ("to {v}", "for {v}"), "owner": ("for {v}", "of {v}"), "duration": ("for {v} minutes",),
    "language": ("in {v}",), "format": ("as {v}", "in {v} format"), "room": ("in the {v}",), "label": ("labelled {v}", "with label {v}"), "members": ("with {v}",), "price": ("for {v} dollars",), "speed": ("at a speed of {v}",),
    "title": ('called "{v}"', "called {v}", "titled {v}"), "name": ("named {v}", "called {v}"), "id": ("number {v}", "with id {v}"), "from": ("from {v}", "from {v}"), "to": ("to {v}", "to {v}"), "agent": ("to {v}", "for {v}"),
    "customer": ("for {v}",), "person": ("for {v}", "to {v}"), "mode": ("in {v} mode", "on {v}"), "reason": ("because of {v}",), "message": ('saying "{v}"',), "file": ("in {v}", "from {v}"), "year": ("from {v}", "of {v}"),
    "station": ("at {v}", "from {v}"), "unit": ("in {v}",), "currency": ("in {v}",), "temperature": ("at {v} degrees", "to {v} degrees"), "priority": ("with {v} priority",), "items": ("with {v}", "containing {v}"), "count": ("{v} times",),
    "color": ("in {v}",), "path": ("at {v}", "in {v}"), "email": ("to {v}", "for {v}"), "level": ("at level {v}", "to {v}"), "topic": ("about {v}", "on {v}"), "category": ("in the category {v}",), "size": ("in size {v}",),
}  # fmt: skip  # fmt: skip
_BOTH: Final = ("with {h} {v}", "with {h} {v}", "with the {h} {v}", "{h} {v}", "{h}: {v}", "where the {h} is {v}", "using {v} as the {h}", "and set the {h} to {v}", "with a {h} of {v}",
                "the {h} should be {v}", "{h} = {v}", "whose {h} is {v}", "with {v} as {h}", "setting {h} to {v}")  # fmt: skip
_YES: Final = (
    "with {h} on",
    "with {h} enabled",
    "{h}: yes",
    "with {h} set to true",
    "{h} = true",
    "and make it {h}",
    "it is {h}",
    "with {h} turned on",
)
_NO: Final = (
    "with {h} off",
    "with {h} disabled",
    "{h}: no",
    "with {h} set to false",
    "{h} = false",
    "and make it not {h}",
    "it is not {h}",
    "with {h} turned off",
)


def invented(src: Source, like: Ask | None = None) -> Ask:
    """A request for a tool with a made-up purpose. `like` makes it differ from another in the action or the object only."""
    stem, said = src.pick(_ACTIONS) if src.chance(0.85) else (word := src.coined(1, 2), (word,))
    thing = [src.coined(1, 2) if src.chance(0.45) else src.pick(NOUNS)]
    if src.chance(0.35):
        thing.insert(0, src.word() if src.chance(0.5) else src.coined(1, 2))
    if like is not None and (old := like.topic.split(":"))[0] == "invented":
        if src.chance(0.5):
            thing = old[2].split()
        else:
            stem, said = next(((s, w) for s, w in _ACTIONS if s == old[1]), (old[1], (old[1],)))
    name = identifier(src, [stem, *thing]) if src.chance(0.85) else identifier(src, [*thing, stem])
    human = " ".join(thing)
    params: list[Param] = []
    arguments: dict[str, Any] = {}
    phrases: list[str] = []
    direct = instead = ""
    for index in range(src.weighted(((0, 0.04), (1, 4), (2, 4), (3, 2.5), (4, 1)))):
        key, kind = _key(src)
        if any(p.name == key for p in params):
            continue
        param = Param(key, "flag" if kind == "bool" else kind, "", required=index == 0 or src.chance(0.6))
        spoken_key = re.sub(r"([a-z])([A-Z])", r"\1 \2", key).replace("_", " ").replace("-", " ").lower()
        if src.chance(0.7):
            param.about = src.pick(
                ("The {h}", "{H} of the {t}", "The {h} of the {t}", "{H}", "The {h} to use", "{H} for the {t}")
            ).format(h=spoken_key, H=spoken_key.capitalize(), t=human)
        params.append(param)
        if not param.required and src.chance(0.45):
            continue
        if kind == "bool":
            value = src.chance(0.5)
            phrases.append(src.pick(_YES if value else _NO).format(h=spoken_key))
        else:
            spoken, value = draw(src, kind)
            if index == 0 and src.chance(0.35):
                if src.chance(0.35) and kind in ("word", "name", "phrase", "code"):
                    # the object is the value: water_plant(plant) is asked for as "water the fern"
                    params[-1].name = key = thing[-1]
                    params[-1].about = src.pick(("", f"Which {key}", f"The {key}", f"The {key} to {said[0]}"))
                    instead = src.pick(("the {v}", "{v}", "the {v}")).format(v=spoken) if kind == "word" else spoken
                    arguments[key] = value
                    continue
                direct = (
                    src.pick((" {v}", " {v}", ' "{v}"', " for {v}", " of {v}")).format(v=spoken)
                    if isinstance(value, str)
                    else " " + spoken
                )
            elif key in _NATURAL and src.chance(0.55):
                phrases.append(src.pick(_NATURAL[key]).format(v=spoken))
            elif isinstance(value, (int, float)) and src.chance(0.3):
                phrases.append(
                    src.pick(
                        ("with {v} {h}", "{v} {h}", "to a {h} of {v}", "a {h} of {v}", "to {h} {v}", "for {v} {h}")
                    ).format(h=spoken_key, v=spoken)
                )
            else:
                phrases.append(src.pick(_BOTH).format(h=spoken_key, v=spoken))
        arguments[key] = value
    user = f"{src.pick(said)} {instead or src.pick(('the ', 'the ', 'the ', 'a ', 'my ', '')) + human + direct}"
    if phrases:
        glue = src.pick((", ", ", ", " and ", " "))
        user += src.pick((" ", ", ", " ")) + (
            glue.join(phrases) if len(phrases) < 3 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
        )
    opener = src.pick(("", "", "", "please ", "can you ", "I want you to ", "I need you to ", "could you ", "now "))
    user = opener + user
    user = (
        user[:1].upper()
        + user[1:]
        + ("?" if opener in ("can you ", "could you ") and src.chance(0.7) else src.pick((".", ".", "", "!")))
    )
    about = src.pick(
        (
            "{s} the {t}.",
            "{S}s a {t}.",
            "{S} a {t}",
            "{S} the {t} in the system.",
            "Use this to {s} a {t}.",
            "{S} {t} by its parameters.",
            "Tool to {s} the {t}",
        )
    ).format(s=said[0] if src.chance(0.7) else stem, S=stem.capitalize(), t=human)
    tool = schema(src, name, about if src.chance(0.88) else "", params)
    return Ask(tool, user, {"name": name, "arguments": arguments}, f"invented:{stem}:{human}")


def _key(src: Source) -> tuple[str, str]:
    """A parameter name of this split and the kind of its value."""
    key, kinds = src.pick(_KEYS)
    kind = src.pick(re.findall(r"\S+", kinds))
    roll = src.rng.random()
    if kind.startswith("enum") and src.chance(0.6):
        kind = "enum:" + ",".join(dict.fromkeys(src.word() for _ in range(src.integer(2, 5))))
    if roll < 0.35:
        return key, kind
    if roll < 0.7:
        return identifier(src, [src.word(), key]), kind
    return (src.word() if roll < 0.9 else identifier(src, [src.word(), src.noun()])), kind


# conversations


def one_ask(src: Source, *, like: Ask | None = None) -> Ask:
    if src.chance(0.5):
        return invented(src, like)
    return known(src, src.pick(FAMILIES))


def toolbox(src: Source, asks: list[Ask], size: int) -> list[dict[str, Any]]:
    """The tools of `asks` and others beside them, in any order."""
    tools = [ask.tool for ask in asks]
    taken = {tool["function"]["name"] for tool in tools}
    topics = {ask.topic for ask in asks}
    while len(tools) < size:
        other = one_ask(src, like=src.pick(asks) if asks and src.chance(0.3) else None)
        if other.tool["function"]["name"] in taken or other.topic in topics:
            continue
        taken.add(other.tool["function"]["name"])
        topics.add(other.topic)
        tools.append(other.tool)
    src.rng.shuffle(tools)
    return tools


def calls_of(asks: list[Ask]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": ask.call} for ask in asks]


def call_thought(asks: list[Ask]) -> str:
    parts: list[str] = []
    for ask in asks:
        values = ", ".join(
            f"{k} is {json.dumps(v, ensure_ascii=False) if not isinstance(v, str) else v}"
            for k, v in ask.call["arguments"].items()
        )
        parts.append(f"The tool {ask.call['name']} fits." + (f" So {values}." if values else ""))
    return " ".join(parts)


def one_call(src: Source) -> Sample:
    ask = one_ask(src)
    tools = toolbox(src, [ask], src.integer(1, 4))
    messages = [{"role": "user", "content": ask.user}, _calling([ask])]
    return Sample("tool call", messages, "calls", tools=tools)


def _calling(asks: list[Ask]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "reasoning_content": call_thought(asks), "tool_calls": calls_of(asks)}


def two_calls(src: Source) -> Sample:
    roll = src.rng.random()
    if roll < 0.35:
        asks, user = _same_tool_twice(src)
    elif roll < 0.5:
        asks, user = _same_request_twice(src)
    else:
        first = one_ask(src)
        second = one_ask(src)
        while second.topic == first.topic or second.call["name"] == first.call["name"]:
            second = one_ask(src)
        asks = [first, second]
        a, b = first.user, second.user
        lowered = b[:1].lower() + b[1:]
        style = src.integer(0, 6)
        stop = a if a[-1] in ".?!" else a + "."
        plain = a.rstrip(".?!")
        user = (
            f"{stop} {b}", f"{stop} Also, {lowered}", f"{plain} and {lowered}", f"{stop} Then {lowered}", f"{plain}, and also {lowered}",
            f"First: {stop} Second: {b}", f"{stop} And {lowered}",
        )[style]  # fmt: skip
    tools = toolbox(
        src,
        asks[:1] if asks[0].tool is asks[1].tool else asks,
        src.integer(1 if asks[0].tool is asks[1].tool else 2, 4),
    )
    return Sample("two tool calls", [{"role": "user", "content": user}, _calling(asks)], "calls", tools=tools)


# Families with one plain value: two values mean two calls.
_DOUBLE: Final = (
    "weather",
    "stock",
    "time",
    "user",
    "define",
    "call",
    "package",
    "read",
    "news",
    "search",
    "service",
    "timer",
    "alarm",
    "delete",
)


def _same_tool_twice(src: Source) -> tuple[list[Ask], str]:
    families = [f for f in FAMILIES if f.topic in _DOUBLE and len(f.params) == 1]
    if src.chance(0.35):
        return _invented_twice(src)
    family = src.pick(families)
    name = src.pick(family.names.split())
    param = _param(src, family.params[0])
    tool = schema(src, name, src.pick(family.about.split("|")), [param])
    values = [draw(src, param.kind) for _ in range(3 if src.chance(0.08) else 2)]
    if len({str(v) for _, v in values}) < len(values):
        return _same_tool_twice(src)
    template = src.template(
        [ask for ask in family.asks.split("|") if "it" not in ask.split() and "them" not in ask.split()]
        or family.asks.split("|")
    )
    spoken = [s for s, _ in values]
    joined = ", ".join(spoken[:-1]) + " and " + spoken[-1]
    style = src.integer(0, 6)
    before = re.search(r"\b(in|of|for|at|user) \{0\}", template)
    if style == 0 and before:
        user = template.format(f" and {before[1]} ".join(spoken))
    elif style == 1:
        user = template.format("both " + joined if len(values) == 2 and '"' not in template else joined)
    elif style == 2:
        user = (
            template.format(spoken[0]).rstrip(".")
            + ". "
            + " ".join(
                src.pick(("And {}?", "Also {}.", "The same for {}.", "And for {}, too.")).format(s) for s in spoken[1:]
            )
        )
    elif style == 3:
        user = " ".join(template.format(s) if template[-1] in ".?!" else template.format(s) + "." for s in spoken)
    else:
        user = template.format(joined)
    asks = [Ask(tool, "", {"name": name, "arguments": {param.name: value}}, family.topic) for _, value in values]
    return asks, user


def _same_request_twice(src: Source) -> tuple[list[Ask], str]:
    """One tool with several parameters, asked for twice in a row, the second time perhaps without the verb."""
    family = src.pick([f for f in FAMILIES if len(f.params) > 1])
    first = known(src, Family(family.names, family.about, family.params, family.asks))
    names = list(first.call["arguments"])
    template = src.pick(family.asks.split("|"))
    asks, users = [], []
    for _ in range(2):
        values = [draw(src, spec.split(";")[1].strip()) for spec in family.params]
        asks.append(
            Ask(
                first.tool,
                "",
                {"name": first.call["name"], "arguments": dict(zip(names, (v for _, v in values), strict=True))},
                family.topic,
            )
        )
        users.append(template.format(*(said for said, _ in values)))
    if asks[0].call == asks[1].call:
        return _same_request_twice(src)
    a, b = users[0].rstrip(".?!"), users[1]
    verb, _, rest = b.partition(" ")
    if template[0] != "{" and verb in (
        "Set",
        "Send",
        "Add",
        "Create",
        "Book",
        "Order",
        "Convert",
        "Translate",
        "Reserve",
        "Remind",
        "Transfer",
        "Pay",
        "Give",
        "Put",
        "Mark",
        "Label",
        "Tag",
        "Get",
        "Show",
        "Email",
        "Tell",
        "Text",
        "Invoice",
    ):
        b = rest if src.chance(0.65) else b[0].lower() + b[1:]
    else:
        b = b[:1].lower() + b[1:]
    return asks, a + src.pick((" and ", " and ", ", and ", " and also ", ", then ")) + b


def _invented_twice(src: Source) -> tuple[list[Ask], str]:
    stem, said = src.pick(_ACTIONS)
    thing = src.coined(1, 2) if src.chance(0.5) else src.pick(NOUNS)
    name = identifier(src, [stem, thing])
    key, kind = _key(src)
    while kind == "bool" or kind.split(":")[0] in ("words", "foods", "names", "numbers", "enum"):
        key, kind = _key(src)
    (a, first), (b, second) = draw(src, kind), draw(src, kind)
    if first == second:
        return _invented_twice(src)
    tool = schema(
        src,
        name,
        f"{stem.capitalize()} a {thing}.",
        [Param(key, kind, f"The {key.replace('_', ' ')}" if src.chance(0.7) else "")],
    )
    said_key = re.sub(r"([a-z])([A-Z])", r"\1 \2", key).replace("_", " ").replace("-", " ").lower()
    verb = src.pick(said)
    user = src.pick(
        (f"{verb} the {thing} {a} and the {thing} {b}.", f"{verb} two {thing}s: one with {said_key} {a} and one with {said_key} {b}.", f"{verb} the {thing}s {a} and {b}.",
         f"{verb} the {thing} with {said_key} {a} and the {thing} with {said_key} {b}.", f"{verb} a {thing} with {said_key} {a}. Then {verb} a {thing} with {said_key} {b}.",
         f"{verb} the {thing} with {said_key} {a} and also the one with {said_key} {b}.", f"{verb} {thing} {a} and also {thing} {b}.", f"{verb} {thing} {a} and {thing} {b}.", f"{verb} {thing} {a} and {b}.")
    )  # fmt: skip
    user = user[:1].upper() + user[1:]
    return [
        Ask(tool, "", {"name": name, "arguments": {key: value}}, f"invented:{stem}:{thing}")
        for value in (first, second)
    ], user


_PLAIN_SKILLS: Final = (
    (smalltalk.smalltalk, 3.0), (facts.capital, 1.0), (facts.opposite, 0.6), (facts.colour, 0.5), (facts.day, 0.5), (facts.spelling, 0.6), (facts.counting, 0.8),
    (transforms.repeat, 0.6), (transforms.uppercase, 0.5), (transforms.reverse, 0.5), (facts.plain, 0.4), (facts.arithmetic, 0.8), (transforms.extract, 0.5),
)  # fmt: skip
_SPOKEN_FOR: Final = {
    "calc",
    "random",
    "time",
    "weather",
    "define",
    "search",
    "translate",
    "note",
    "message",
    "read",
    "units",
}


def no_call(src: Source) -> Sample:
    if src.chance(0.5):
        turn: Turn = src.weighted(_PLAIN_SKILLS)(src)
        asks = [one_ask(src) for _ in range(src.integer(1, 4))]
        while any(ask.topic in _SPOKEN_FOR for ask in asks):
            asks = [one_ask(src) for _ in range(len(asks))]
        names: dict[str, dict[str, Any]] = {ask.tool["function"]["name"]: ask.tool for ask in asks}
        answer = {
            "role": "assistant",
            "content": turn.answer,
            "reasoning_content": f"No tool is needed. {turn.thought}",
        }
        return Sample(
            "no tool call", [{"role": "user", "content": turn.user}, answer], "calls", tools=list(names.values())
        )
    wanted = one_ask(src)
    others = [one_ask(src) for _ in range(src.integer(1, 4))]
    while any(
        other.topic.split(":")[-1] == wanted.topic.split(":")[-1] or _near(other.topic, wanted.topic)
        for other in others
    ):
        others = [one_ask(src) for _ in range(len(others))]
    names = {ask.tool["function"]["name"]: ask.tool for ask in others}
    answer = {"role": "assistant", "content": NO_TOOL, "reasoning_content": "No tool fits this request."}
    return Sample(
        "no tool call", [{"role": "user", "content": wanted.user}, answer], "calls", tools=list(names.values())
    )


_NEAR: Final = (
    {"weather", "search", "news"}, {"mail", "message", "contact", "call"}, {"timer", "alarm", "reminder", "calendar", "todo", "note"}, {"cart", "shopping", "products", "pizza"},
    {"read", "list", "grep", "delete", "write", "shell", "search"}, {"calc", "currency", "units", "random"}, {"define", "translate", "search"}, {"route", "flight"},
    {"restaurant", "table", "pizza"}, {"user", "account", "db"}, {"money", "invoice"}, {"light", "thermostat"}, {"search", "stock"}, {"package", "search"}, {"service", "shell"},
    {"time", "search"}, {"ticket", "tags"}, {"image", "search"}, {"music", "search"}, {"weather", "thermostat"}, {"todo", "note", "shopping"},
)  # fmt: skip


def _near(left: str, right: str) -> bool:
    return any(left in group and right in group for group in _NEAR)


# results

_RESULT_KEYS: Final = (
    "temperature condition humidity wind status result price total count name city message id time date amount balance title distance duration rating author "
    "owner phone email color size weight speed stock quantity available success sent confirmed language population score level currency rate address"
).split()


def result(src: Source) -> tuple[str, str, tuple[str, ...]]:
    """What a tool returned, the sentence that tells it, and what the sentence must hold."""
    kind = src.weighted((("object", 6), ("text", 3), ("value", 1.2), ("list", 1), ("objects", 0.7), ("error", 1)))
    match kind:
        case "text":
            text = src.pick(
                (
                    src.sentence(),
                    f"{src.word().capitalize()}, {src.integer(-10, 40)} degrees",
                    f"{src.word()} {src.code()} {src.word()}",
                    src.paragraph(2),
                    f"{src.word().capitalize()} {src.noun()}: {src.number()}",
                )
            )
            said = text if text[-1] in ".!?" else text + "."
            return text, said[:1].upper() + said[1:], (text.rstrip(".!?"),)
        case "value":
            value = src.pick((src.number(), src.decimal(), -src.integer(1, 40)))
            return str(value), f"The result is {value}.", (str(value),)
        case "error":
            reason = src.pick(
                (
                    f"{src.noun()} not found",
                    "permission denied",
                    "timeout",
                    f"unknown {src.noun()}",
                    f"invalid {src.word()}",
                    f"{src.word()} is not available",
                )
            )
            raw = src.pick(
                (json.dumps({"error": reason}), f"Error: {reason}", json.dumps({"status": "error", "message": reason}))
            )
            return raw, f"The tool reported an error: {reason}.", (reason,)
        case "list":
            items = src.words(2, 5)
            raw: Any = (
                items
                if src.chance(0.4)
                else {(key := src.pick(("items", "results", "names", "files", "options"))): items}
            )
            said = ", ".join(items[:-1]) + " and " + items[-1]
            return (
                json.dumps(raw),
                (f"The {key} are {said}." if isinstance(raw, dict) else f"The results are {said}."),
                tuple(items),
            )
        case "objects":
            keys = src.sample(_RESULT_KEYS[:30], 2)
            rows = [{k: _value(src, k) for k in keys} for _ in range(src.integer(2, 3))]
            raw = rows if src.chance(0.5) else {"results": rows}
            said = "; ".join(", ".join(f"{k} {v}" for k, v in row.items()) for row in rows)
            return (
                json.dumps(raw, ensure_ascii=False),
                f"I found {len(rows)} results: {said}.",
                tuple(str(v) for row in rows for v in row.values()),
            )
    keys = [
        src.pick(_RESULT_KEYS) if src.chance(0.75) else src.word() if src.chance(0.5) else f"{src.word()}_{src.noun()}"
        for _ in range(src.integer(1, 5))
    ]
    record = {key: _value(src, key) for key in dict.fromkeys(keys)}
    parts = [_told(key, value) for key, value in record.items()]
    said = (", ".join(parts[:-1]) + " and " if len(parts) > 1 else "") + parts[-1] + "."
    shown: Any = record if src.chance(0.88) else {src.pick(("result", "data", "output")): record}
    return (
        json.dumps(shown, ensure_ascii=False, indent=2 if src.chance(0.08) else None),
        said[:1].upper() + said[1:],
        tuple(str(v) for v in record.values() if not isinstance(v, bool)),
    )


def _told(key: str, value: Any) -> str:
    human = key.replace("_", " ")
    if isinstance(value, bool):
        return f"{human} is {'true' if value else 'false'}"
    return f"the {human} is {value}"


def _value(src: Source, key: str) -> Any:
    if key in ("available", "success", "sent", "confirmed"):
        return src.chance(0.5)
    if key in (
        "temperature",
        "humidity",
        "wind",
        "price",
        "total",
        "count",
        "id",
        "amount",
        "balance",
        "distance",
        "duration",
        "rating",
        "weight",
        "speed",
        "stock",
        "quantity",
        "population",
        "score",
        "level",
        "rate",
    ):
        return (
            src.pick((src.number(), src.number(), src.decimal(), -src.integer(1, 30)))
            if key != "count"
            else src.number()
        )
    return src.pick(
        (
            src.word(),
            src.word(),
            src.name(),
            src.city(),
            src.code(),
            " ".join(src.words(2, 3)),
            src.time(),
            src.date(),
            src.number(),
        )
    )


def answered(src: Source) -> Sample:
    """A conversation whose tools have answered; sometimes the user then asks for more."""
    sample = two_calls(src) if src.chance(0.25) else one_call(src)
    messages = sample.messages
    said: list[str] = []
    keys: list[str] = []
    calling = messages[-1]
    for index, call in enumerate(calling["tool_calls"]):
        raw, told, found = result(src)
        while len(calling["tool_calls"]) > 1 and "error" in told:
            raw, told, found = result(src)
        call["id"] = f"call_{src.integer(1000, 9999)}{index}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": raw})
        said.append(told)
        keys += found
    if not src.chance(0.5):
        calling.pop("reasoning_content", None)
    answer = " ".join(said)
    messages.append(
        {
            "role": "assistant",
            "content": answer,
            "reasoning_content": "The tool answered. I tell the user what it says.",
        }
    )
    if src.chance(0.25):
        return _again(src, sample)
    return Sample("tool results", messages, "contains", tuple(keys), tools=sample.tools)


def _again(src: Source, sample: Sample) -> Sample:
    """The next request of the same conversation: another tool, or none."""
    assert sample.tools is not None
    if src.chance(0.4):
        turn: Turn = src.weighted(
            ((smalltalk.smalltalk, 2.0), (facts.capital, 1.0), (facts.opposite, 1.0), (facts.colour, 1.0))
        )(src)
        messages = [
            *sample.messages,
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer, "reasoning_content": f"No tool is needed. {turn.thought}"},
        ]
        return Sample("no tool call", messages, "calls", tools=sample.tools)
    ask = one_ask(src)
    while any(ask.call["name"] == tool["function"]["name"] for tool in sample.tools):
        ask = one_ask(src)
    tools = [*sample.tools[:3], ask.tool]
    used = {call["function"]["name"] for m in sample.messages for call in m.get("tool_calls") or ()}
    tools = [ask.tool, *(tool for tool in sample.tools if tool["function"]["name"] in used)]
    src.rng.shuffle(tools)
    return Sample(
        "tool call", [*sample.messages, {"role": "user", "content": ask.user}, _calling([ask])], "calls", tools=tools
    )


SKILLS: Final = ((one_call, 6.0), (two_calls, 3.5), (no_call, 3.0), (answered, 4.0))
