"""Arithmetic skills: sums in digits, in words, and as stories."""

from .files import phrasings
from .samples import Turn
from .words import NUMBER_WORDS, Source


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
        {
            "+": ("plus", "+", "+", "+"),
            "-": ("minus", "-", "-", "-"),
            "*": ("times", "*", "x", "×", "multiplied by"),
            "/": ("divided by", "/", "÷"),
        }[kind]
    )
    gap = "" if spoken in "+-*x/×÷" and src.chance(0.2) else " "
    expression = f"{left}{gap}{spoken}{gap}{right}"
    templates = [*phrasings("arithmetic", "any")]
    if kind == "+":
        templates += phrasings("arithmetic", "plus")
    elif kind == "-":
        templates += phrasings("arithmetic", "minus")
        if a < b:
            templates = templates[:24]
    elif kind == "*":
        templates += phrasings("arithmetic", "times")
    else:
        templates += phrasings("arithmetic", "divide")
    sign = {"*": "*", "/": "/"}.get(kind, kind)
    return Turn(src.ask(templates, e=expression, l=left, r=right), str(result), f"{a} {sign} {b} = {result}.")


def _story(src: Source) -> Turn:
    name, thing = src.name(), src.thing()
    plural = thing + ("" if thing.endswith("s") else "s")
    a, b = src.integer(2, 30), src.integer(1, 20)
    who = src.pick(("I have", f"{name} has", "You have", "There are"))
    ask_more = src.pick(
        (
            "How many are there now?",
            "How many is that in total?",
            "How many altogether?",
            "What is the total?",
            "How many does that make?",
            f"How many {plural} are there?",
        )
    )
    if src.chance(0.55):
        gain = src.pick((f"buys {b} more", f"gets {b} more", f"finds {b} more", f"is given {b} more"))
        text = {
            "I have": f"I have {a} {plural} and get {b} more.",
            "There are": f"There are {a} {plural}. Then {b} more arrive.",
            "You have": f"You have {a} {plural} and I give you {b} more.",
        }.get(who, f"{name} has {a} {plural} and {gain}.")
        return Turn(f"{text} {ask_more}", str(a + b), f"{a} + {b} = {a + b}.")
    a, b = max(a, b), min(a, b)
    loss = src.pick((f"gives away {b}", f"loses {b}", f"sells {b}", f"eats {b}", f"breaks {b}"))
    text = {
        "I have": f"I have {a} {plural} and lose {b}.",
        "There are": f"There are {a} {plural}. Then {b} are taken away.",
        "You have": f"You have {a} {plural} and give me {b}.",
    }.get(who, f"{name} has {a} {plural} and {loss}.")
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
