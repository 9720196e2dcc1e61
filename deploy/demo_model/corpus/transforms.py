"""Copying and changing what the user gives."""

from typing import Final

from .samples import Turn
from .words import Source

_REPEAT: Final = (
    "Repeat after me: {t}", "Repeat this: {t}", "Say exactly this: {t}", 'Repeat "{t}"', "Echo this back: {t}", "Say: {t}",
    'Say "{t}"', "Repeat the following: {t}", "Repeat the following sentence exactly:\n{t}", "Copy this text: {t}", "echo {t}",
    "Please repeat exactly: {t}", "Write this back to me: {t}", "Print the following text:\n\n{t}", "Repeat word for word: {t}",
    "Copy the following exactly:\n{t}", 'Output exactly: "{t}"', "Can you repeat this for me? {t}", 'Please say "{t}" back to me.',
    'Repeat the following text exactly: "{t}"', "Reply with exactly this: {t}", "Return this text unchanged: {t}",
    "Respond with only this: {t}", "Type this: {t}", "Repeat back: {t}", "Say the following: '{t}'",
    "Reply with only the following and nothing else: {t}", "Just echo: {t}", "I want you to repeat this: {t}", "Parrot this: {t}",
)  # fmt: skip
_UPPER: Final = (
    "Uppercase this: {t}", "Convert to uppercase: {t}", 'Write "{t}" in uppercase.', "Make this uppercase: {t}", "uppercase: {t}",
    "Put this in capital letters: {t}", "Change to upper case: {t}", "Turn this into uppercase: {t}", "Uppercase the following: {t}",
    "Write this in all caps: {t}", "Convert the following text to uppercase:\n{t}", 'Uppercase "{t}"', "Capitalize every letter: {t}",
    "Write {t} in capital letters.", "Please put '{t}' in upper case.", "All caps please: {t}", "What is '{t}' in uppercase?",
    "Transform to uppercase: {t}", "Return this in uppercase: {t}", "Make it all caps: {t}", "Can you uppercase this? {t}",
    'Convert "{t}" to uppercase.', "to upper case: {t}", "Shout this: {t}", "Rewrite in capital letters: {t}",
    "Please convert '{t}' to upper case letters.", "Give me {t} in uppercase.", "Change '{t}' to all caps.",
)  # fmt: skip
_LOWER: Final = (
    "Lowercase this: {t}", "Convert to lowercase: {t}", 'Write "{t}" in lowercase.', "Make this lowercase: {t}", "lowercase: {t}",
    "Change to lower case: {t}", "Turn this into lowercase: {t}", "Write this in small letters: {t}", 'Lowercase "{t}"',
    "Convert the following text to lowercase:\n{t}", "What is '{t}' in lowercase?", "Transform to lowercase: {t}",
    'Convert "{t}" to lowercase.', "Return this in lowercase: {t}", "Put this in lower case: {t}", "Please make '{t}' lower case.",
)  # fmt: skip
_REVERSE: Final = (
    "Reverse this list: {t}", "Reverse the order of these words: {t}", "Reverse these words: {t}", "Write these words in reverse order: {t}",
    "Put this list in reverse order: {t}", "Reverse the list of words: {t}", "List these backwards: {t}", "Reverse the following list: {t}",
    "Give me these words in reverse order: {t}", "Reverse the word order: {t}", "Say these words from last to first: {t}",
    "Turn this list around: {t}", "In reverse order, please: {t}", "Reverse: {t}", "Can you reverse this list of words? {t}",
    "Here are some words: {t}. Reverse their order.", "Please list {t} in reverse order.", "reverse the list {t}",
    "What is this list backwards: {t}", "Flip the order of this list: {t}", "Reverse this list of words: {t}", "Reverse the words: {t}",
    "Put these words in the opposite order: {t}", "Write this list the other way round: {t}", "Give me the list in the opposite order: {t}", "Turn the order of these words around: {t}", "Start with the last word and end with the first: {t}",
    "Sort these words from last to first: {t}", "Invert the order of these words: {t}", "Return the words in reversed order: {t}", "Print this list backwards: {t}", "Can you write these words backwards, last one first: {t}",
    "Order these from last to first: {t}", "Reverse the order of the following words: {t}",
)  # fmt: skip
_NAME: Final = (
    "Extract the name: {t}", "Extract the name from this sentence: {t}", 'What name is in "{t}"?', "Which name appears in this text: {t}",
    "Find the name in this sentence: {t}", "Get the person's name from: {t}", "What is the name of the person in this sentence? {t}",
    "Pull out the name: {t}", 'Extract the person\'s name from "{t}"', "Extract the name from the following text:\n{t}", "{t} Extract the name.",
    "Give me only the name in: {t}", "name in this text: {t}", "Read this and tell me the name: {t}", "Who is mentioned here? {t}",
    "{t}\n\nWhat name is mentioned above?", "Return only the person's name: {t}", "Extract the name of the person: {t}",
    "Which person is mentioned in this text? {t}", "Find the person's name: {t}", "Text: {t}\nName:", "From this text, extract the name: {t}",
)  # fmt: skip
_NUMBER: Final = (
    "Extract the number: {t}", "Extract the number from this sentence: {t}", 'What number is in "{t}"?', "Which number appears in this text: {t}",
    "Find the number in this sentence: {t}", "Get the number from: {t}", "What is the number in this sentence? {t}", "Pull out the number: {t}",
    'Extract the number from "{t}"', "Extract the number from the following text:\n{t}", "{t} Extract the number.", "number in this text: {t}",
    "Give me only the number in: {t}", "Read this and tell me the number: {t}", "{t}\n\nWhat number is mentioned above?",
    "Return only the number: {t}", "Which number is mentioned here? {t}", "Find the number: {t}", "Text: {t}\nNumber:",
    "From this text, extract the number: {t}", "What number does this sentence contain: {t}", "Just the number, please: {t}",
)  # fmt: skip
_NAMED: Final = (
    "My friend {n} lives in {c}.", "{n} is {k} years old.", "Yesterday I met {n} at the {o}.", "The {o} belongs to {n}.", "I am {n}.",
    "{n} bought {k} {o}s.", "The winner was {n} with {k} points.", "Her name is {n} and she works in {c}.", "{n} is a {a} person.",
    "Please send the {o} to {n}.", "{n} will arrive on {d}.", "We asked {n} about the {o}.", "The {a} {o} was found by {n}.",
    "Hello, my name is {n} and I live in {c}.", "On {d}, {n} goes to the {o}.", "It was {n} who lost the {o}.", "Call {n} before {d}.",
    "The teacher, {n}, has {k} books.", "My brother {n} likes {a} {o}s.", "A letter from {n} came from {c}.", "I'm {n}, nice to meet you.",
    "The meeting with {n} is on {d}.", "Dr. {n} works at the {o}.", "Someone called {n} left {k} messages.", "This is {n} from {c}.",
    "Yesterday {n} bought a {o}.", "Today {n} is in {c}.", "Then {n} opened the {o}.", "Later {n} moved to {c}.", "Usually {n} likes the {o}.", "Last {d} {n} came home.", "Tomorrow {n} will call.", "In {c}, {n} found a {o}.",
    "The package was delivered to {n} on {d}.", "The book was written by {n}.", "Our guest {n} is {a}.", "Ask {n} for the {o}.", "Did {n} bring the {o}?", "{n} called.", "A man named {n} came in.", "Mr. {n} is here.",
)  # fmt: skip
_NUMBERED: Final = (
    "My friend {n} has {k} {o}s.", "The {o} costs {k} dollars.", "There are {k} {o}s in {c}.", "{n} is {k} years old.", "Room {k} is free.",
    "We waited {k} minutes for the {o}.", "The train to {c} leaves from platform {k}.", "I paid {k} for the {a} {o}.", "Order {k} is ready.",
    "The code is {k}.", "Only {k} people came to the {o}.", "He ran {k} miles on {d}.", "The {o} weighs {k} kilos.", "Chapter {k} is about {c}.",
    "{n} scored {k} points in {c}.", "It takes {k} hours to reach {c}.", "The {a} {o} has {k} parts.", "I have {k} {o}s at home.",
    "The temperature in {c} was {k} degrees.", "Please bring {k} {o}s on {d}.", "Bus {k} goes to {c}.", "The invoice number is {k}.",
    "She sold {k} {a} {o}s.", "My locker is number {k}.",
)  # fmt: skip
PLACES: Final = ("first", "second", "third", "fourth", "last")


def payload(src: Source) -> str:
    kind = src.integer(0, 9)
    if kind < 3:
        return " ".join(src.words(1, 6))
    if kind < 8:
        return src.sentence()
    if kind == 8:
        return src.pick(
            (
                src.full_name(),
                src.code(),
                src.email(),
                f"{src.coined()}_{src.word()}",
                str(src.number()),
                src.paragraph(2),
            )
        )
    return " ".join(
        src.pick((src.word(), src.coined(), src.name(), str(src.number()), src.code()))
        for _ in range(src.integer(2, 6))
    )


def repeat(src: Source) -> Turn:
    text = payload(src)
    if src.chance(0.1):
        count = src.integer(2, 5)
        word = src.word()
        said = src.pick((str(count), ("two", "three", "four", "five")[count - 2]))
        user = src.ask(
            ("Say {w} {k} times.", 'Repeat "{w}" {k} times.', "Write the word {w} {k} times.", "Repeat the word {w} {k} times.",
             "Type {w} {k} times", "Print {w} {k} times.", "Say '{w}' {k} times in a row."), w=word, k=said,
        )  # fmt: skip
        return Turn(user, " ".join([word] * count), f"I repeat {word} {count} times.")
    return Turn(src.ask(_REPEAT, t=text), text, f"The user wants me to repeat: {text}")


def uppercase(src: Source) -> Turn:
    text = payload(src) if src.chance(0.6) else " ".join(src.words(1, 4))
    return Turn(src.ask(_UPPER, t=text), text.upper(), "I write the text in capital letters.")


def lowercase(src: Source) -> Turn:
    text = payload(src)
    text = text.upper() if src.chance(0.6) else text.title()
    return Turn(src.ask(_LOWER, t=text), text.lower(), "I write the text in small letters.")


def reverse(src: Source) -> Turn:
    words = src.words(2, 8)
    if src.chance(0.1):
        words = [src.name() for _ in words]
    elif src.chance(0.06):
        words = [str(src.integer(1, 99)) for _ in words]
    style = src.integer(0, 9)
    backwards = words[::-1]
    if style < 4:
        text, answer = ", ".join(words), ", ".join(backwards)
    elif style < 8:
        text, answer = " ".join(words), " ".join(backwards)
    elif style == 8:
        text, answer = ", ".join(words[:-1]) + " and " + words[-1], ", ".join(backwards)
    else:
        text, answer = "\n" + "\n".join(words), "\n".join(backwards)
        return Turn(
            src.template(_REVERSE[:8]).format(t=text), answer, f"The last word is {words[-1]}, so I start with it."
        )
    return Turn(src.ask(_REVERSE, t=text), answer, f"The last word is {words[-1]}, so I start with it.")


def reverse_letters(src: Source) -> Turn:
    word = src.word()
    user = src.ask(
        ('Reverse the letters of "{w}".', "Spell {w} backwards.", "Write the word {w} backwards.", 'What is "{w}" spelled backwards?',
         "Reverse the word {w}.", "Write '{w}' in reverse.", "Reverse the letters in the word {w}.", "Reverse the string \"{w}\"."), w=word,
    )  # fmt: skip
    backwards = "-".join(word[::-1]) if user.lower().find("spell ") >= 0 else word[::-1]
    return Turn(user, backwards, f"The letters are {' '.join(word)}. Backwards they are {' '.join(word[::-1])}.")


def extract(src: Source) -> Turn:
    slots = {"n": src.full_name() if src.chance(0.25) else src.name(), "c": src.city(), "k": src.number(), "o": src.noun(),
             "a": src.word(), "d": src.pick(("Monday", "Friday", "Sunday", "Tuesday", "Wednesday", "Thursday", "Saturday"))}  # fmt: skip
    kind = src.integer(0, 9)
    before = src.sentence() + " " if src.chance(0.12) else ""
    if kind < 4:
        text = src.template(_NAMED).format(**slots)
        return Turn(src.ask(_NAME, t=text), str(slots["n"]), f"The name in the text is {slots['n']}.")
    if kind < 8:
        text = src.template(_NUMBERED).format(**slots)
        if src.chance(0.12):
            slots["k"] = src.decimal()
            text = src.template(_NUMBERED).format(**slots)
        return Turn(src.ask(_NUMBER, t=text), str(slots["k"]), f"The number in the text is {slots['k']}.")
    what, value = src.pick((("email address", src.email()), ("email", src.email()), ("city", src.city()), ("date", src.date()),
                            ("code", src.code()), ("time", src.time()), ("color", src.colour())))  # fmt: skip
    carrier = {
        "city": ("{n} lives in {v}.", "The {o} is in {v}.", "We travel to {v} on {d}.", "I moved to {v} last year.", "{n} comes from {v}.", "Greetings from {v}!"),
        "date": ("The meeting is on {v}.", "{n} was born on {v}.", "The {o} arrives on {v}.", "On {v} we leave.", "It happened on {v} at the {o}."),
        "time": ("The meeting is at {v}.", "{n} arrives at {v}.", "The {o} opens at {v}.", "Wake me at {v}.", "At {v} we leave."),
        "color": ("{n} has a {v} {o}.", "The {o} is {v}.", "I painted the {o} {v}.", "She wore a {v} hat."),
        "code": ("The code is {v}.", "{n} uses the code {v}.", "Enter {v} to open the {o}.", "Use {v} at the {o}."),
    }.get(what, ("Write to {v}.", "You can reach {n} at {v}.", "My address is {v}, thanks.", "Contact: {v}", "Send the {o} to {v}."))  # fmt: skip
    text = before + src.pick(carrier).format(v=value, **slots)
    user = src.ask(
        ("Extract the {w}: {t}", "Extract the {w} from this text: {t}", "What {w} is in this sentence? {t}", "Find the {w}: {t}", "Which {w} is mentioned here? {t}",
         "Give me only the {w} in: {t}", "{t}\nWhat is the {w}?", "Return only the {w}: {t}", "Get the {w} from this: {t}", "Text: {t} Extract the {w}."),
        w=what, t=text,
    )  # fmt: skip
    return Turn(user, value, f"The {what} in the text is {value}.")


def pick_word(src: Source) -> Turn:
    words = src.words(3, 7)
    place = src.integer(0, min(4, len(words) - 1))
    label = PLACES[place]
    answer = words[-1] if label == "last" else words[place]
    text = " ".join(words) if src.chance(0.5) else ", ".join(words)
    user = src.ask(
        ("What is the {p} word in: {t}", 'What is the {p} word of "{t}"?', "Give me the {p} word: {t}", "Which word is {p} in this list: {t}",
         "Return the {p} word of this: {t}", "The {p} word of '{t}' is", "Pick the {p} item of this list: {t}", "Tell me the {p} word: {t}"),
        p=label, t=text,
    )  # fmt: skip
    return Turn(user, answer, f"The words are {', '.join(words)}. The {label} one is {answer}.")


def rejoin(src: Source) -> Turn:
    words = src.words(2, 7)
    kind = src.integer(0, 5)
    if kind == 0:
        user = src.ask(
            ("Turn this into a comma separated list: {t}", "Join these words with commas: {t}", "Put commas between these words: {t}",
             "Make a comma-separated list of: {t}", "Separate with commas: {t}", "Add commas between the words: {t}"), t=" ".join(words),
        )  # fmt: skip
        return Turn(user, ", ".join(words), "I put commas between the words.")
    if kind == 1:
        user = src.ask(
            ("Make a bullet list of: {t}", "Turn this into a bullet list: {t}", "Write these as bullet points: {t}", "List these as bullets: {t}",
             "Format as a bulleted list: {t}", "Bullet points, please: {t}"), t=", ".join(words),
        )  # fmt: skip
        return Turn(user, "\n".join(f"- {word}" for word in words), "I write each item on its own line.")
    if kind == 2:
        user = src.ask(
            ("Make a numbered list of: {t}", "Number these items: {t}", "Turn this into a numbered list: {t}", "Write a numbered list: {t}",
             "Format as a numbered list: {t}", "List these with numbers: {t}"), t=", ".join(words),
        )  # fmt: skip
        return Turn(user, "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)), "I number each item.")
    if kind == 3:
        gone = src.pick(words)
        user = src.ask(
            ("Remove {w} from this list: {t}", "Delete {w} from: {t}", "Take {w} out of this list: {t}", "Drop '{w}' from the list {t}",
             "Write this list without {w}: {t}", "Leave out {w}: {t}"), w=gone, t=", ".join(words),
        )  # fmt: skip
        return Turn(user, ", ".join(word for word in words if word != gone), f"I leave out {gone}.")
    if kind == 4:
        old, new = src.pick(words), src.word()
        user = src.ask(
            ("Replace {a} with {b}: {t}", 'Replace "{a}" with "{b}" in: {t}', "Swap {a} for {b} in this text: {t}", "Change {a} to {b}: {t}",
             "In this text, replace {a} by {b}: {t}", "Substitute {b} for {a} in: {t}"), a=old, b=new, t=" ".join(words),
        )  # fmt: skip
        return Turn(user, " ".join(new if word == old else word for word in words), f"I write {new} where {old} was.")
    user = src.ask(
        ("Capitalize each word: {t}", "Title case this: {t}", "Write in title case: {t}", "Capitalize the first letter of each word: {t}",
         "Make each word start with a capital: {t}", "Convert to title case: {t}"), t=" ".join(words),
    )  # fmt: skip
    return Turn(user, " ".join(word.capitalize() for word in words), "Each word starts with a capital letter.")


SKILLS: Final = (
    (repeat, 4.0), (uppercase, 4.0), (lowercase, 1.5), (reverse, 4.0), (reverse_letters, 0.7), (extract, 5.0), (pick_word, 1.0), (rejoin, 1.5),
)  # fmt: skip
