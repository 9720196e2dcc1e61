"""Prompts written by hand, apart from the generator. Only ever measured, though what failed here has steered the generator."""

from typing import Any, Final

from deploy.demo_model.corpus.samples import Check, Sample

_ONE: Final[tuple[tuple[str, str, str, Check, tuple[str, ...]], ...]] = (
    ("small talk", "Hey, who exactly am I chatting with right now?", "", "contains", ("demo model",)),
    ("small talk", "Hello there, tell me a little bit about yourself!", "", "contains", ("demo model",)),
    ("small talk", "In short, what is this mlxd thing?", "", "contains", ("serving daemon",)),
    ("small talk", "What would you say mlxd is?", "", "contains", ("serving daemon",)),
    ("small talk", "I want to add my own real model, what should I do?", "", "contains", ("[models.",)),
    ("small talk", "How do I get mlxd to serve a real model instead of you?", "", "contains", ("[models.",)),
    ("small talk", "Thank you so much for that!", "", "contains", ("welcome",)),
    ("small talk", "Hi! How are you doing this morning?", "", "contains", ("well",)),
    ("facts", "Please tell me which city is the capital of Norway.", "Oslo", "contains", ("oslo",)),
    ("facts", "Name the capital city of Kenya, please.", "", "contains", ("nairobi",)),
    ("facts", "What's the capital of the country Peru?", "", "contains", ("lima",)),
    ("facts", "What color is a banana?", "", "contains", ("yellow",)),
    ("facts", "Tell me what colour grass normally is.", "", "contains", ("green",)),
    ("facts", "What is the antonym of the word 'cold'?", "", "contains", ("hot",)),
    ("facts", "Give me the word that is opposite to 'big'.", "", "contains", ("small",)),
    ("facts", "Please count from 4 to 9 for me.", "4, 5, 6, 7, 8, 9", "exact", ()),
    ("facts", "Could you count from 12 up to 17?", "12, 13, 14, 15, 16, 17", "exact", ()),
    ("facts", "How do you spell the word 'elephant'?", "e-l-e-p-h-a-n-t", "exact", ()),
    ("facts", "Spell the word umbrella, please.", "u-m-b-r-e-l-l-a", "exact", ()),
    ("facts", "Which day of the week comes right after Thursday?", "", "contains", ("friday",)),
    ("facts", "What day comes before Sunday?", "", "contains", ("saturday",)),
    ("facts", "What month follows June?", "", "contains", ("july",)),
    ("facts", "How much is 17 plus 25?", "42", "exact", ()),
    ("facts", "What is 9 times 7?", "63", "exact", ()),
    ("facts", "Compute 83 - 46.", "37", "exact", ()),
    ("facts", "How many letters does the word 'banana' have?", "6", "exact", ()),
    ("facts", "How many words are there in the sentence 'The dog ran home'?", "4", "exact", ()),
    ("transforms", "Repeat the following sentence back to me: The purple kettle sings at midnight.", "The purple kettle sings at midnight.", "exact", ()),
    ("transforms", "Please repeat exactly what I write: zorblax 77 quimby", "zorblax 77 quimby", "exact", ()),
    ("transforms", "Convert the following to uppercase: velvet harbor", "VELVET HARBOR", "exact", ()),
    ("transforms", "Can you write 'good morning' in capital letters?", "GOOD MORNING", "exact", ()),
    ("transforms", "Put these words in the opposite order: lamp, river, pencil", "pencil, river, lamp", "exact", ()),
    ("transforms", "Reverse the order of this list of words: sun moon star sky", "sky star moon sun", "exact", ()),
    ("transforms", "What is the person's name in this sentence: 'Yesterday Marguerite bought a bicycle.'", "Marguerite", "exact", ()),
    ("transforms", "Extract the person's name: The package was delivered to Theodora on Friday.", "Theodora", "exact", ()),
    ("transforms", "Extract only the number from this text: We sold 348 tickets yesterday.", "348", "exact", ()),
    ("transforms", "Which number appears in 'Flight 7261 is delayed'?", "7261", "exact", ()),
    ("transforms", "Make this lowercase: GREEN PEPPER SOUP", "green pepper soup", "exact", ()),
    ("json", "Give me a JSON object with the keys \"name\" and \"age\" for this: Bartholomew is 52 years old.", '{"name": "Bartholomew", "age": 52}', "json", ()),
    ("json", "Schema: {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}, \"population\": {\"type\": \"integer\"}}}\nWrite JSON for: The city of Ravenmoor has a population of 48210.", '{"city": "Ravenmoor", "population": 48210}', "json", ()),
    ("json", "Extract product (string), price (number) and in_stock (boolean) as JSON: The Lumina desk costs 129.5 dollars and is in stock.", '{"product": "Lumina desk", "price": 129.5, "in_stock": true}', "json", ()),
    ("json", "Return only JSON with title and year. The film Silent Harbor came out in 1987.", '{"title": "Silent Harbor", "year": 1987}', "json", ()),
    ("json", "Produce JSON with fields name, city and hobbies (array of strings): Ottoline lives in Brackwater and likes rowing and chess.", '{"name": "Ottoline", "city": "Brackwater", "hobbies": ["rowing", "chess"]}', "json", ()),
)  # fmt: skip

S: Final = {"type": "string"}
_TOOLS: Final[dict[str, tuple[str, dict[str, Any], list[str]]]] = {
    "water_plant": ("Water a plant in the greenhouse.", {"plant": {"type": "string", "description": "Which plant to water"}, "liters": {"type": "number", "description": "Amount of water in liters"}}, ["plant", "liters"]),
    "set_oven": ("Set the oven to a temperature and mode.", {"temperature": {"type": "integer", "description": "Temperature in degrees"}, "mode": {"type": "string", "enum": ["bake", "grill", "steam"]}}, ["temperature"]),
    "assign_ticket": ("Assign a support ticket to an agent.", {"ticket_id": {"type": "integer", "description": "The ticket number"}, "agent": {"type": "string", "description": "Name of the agent"}}, ["ticket_id", "agent"]),
    "lookup_train": ("Find a train between two stations.", {"from_station": S, "to_station": S}, ["from_station", "to_station"]),
    "mute_microphone": ("Mute or unmute the microphone.", {"muted": {"type": "boolean", "description": "True to mute"}}, ["muted"]),
    "create_playlist": ("Create a playlist with songs.", {"name": {"type": "string", "description": "Playlist name"}, "songs": {"type": "array", "items": S, "description": "Songs to add"}}, ["name", "songs"]),
    "get_weather": ("Get the current weather in a city.", {"city": S, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, ["city"]),
    "resize_photo": ("Resize a photo.", {"file": S, "width": {"type": "integer"}, "height": {"type": "integer"}}, ["file", "width", "height"]),
    "zorvath_lookup": ("Look up a zorvath record by its code.", {"code": {"type": "string", "description": "The zorvath code"}}, ["code"]),
}  # fmt: skip
_CALLS: Final[tuple[tuple[str, str, list[tuple[str, dict[str, Any]]]], ...]] = (
    ("tool call", "Please water the fern with 2.5 liters.", [("water_plant", {"plant": "fern", "liters": 2.5})]),
    ("tool call", "Set the oven to 180 degrees in grill mode.", [("set_oven", {"temperature": 180, "mode": "grill"})]),
    ("tool call", "Assign ticket 4821 to Rosalind.", [("assign_ticket", {"ticket_id": 4821, "agent": "Rosalind"})]),
    ("tool call", "Find me a train from Ravenmoor to Brackwater.", [("lookup_train", {"from_station": "Ravenmoor", "to_station": "Brackwater"})]),
    ("tool call", "Mute the microphone, please.", [("mute_microphone", {"muted": True})]),
    ("tool call", 'Create a playlist called "Roadtrip" with the songs Thunder, Halo and Clocks.', [("create_playlist", {"name": "Roadtrip", "songs": ["Thunder", "Halo", "Clocks"]})]),
    ("tool call", "What's the weather in Ljubljana?", [("get_weather", {"city": "Ljubljana"})]),
    ("tool call", "How hot is it in Fahrenheit in Phoenix right now?", [("get_weather", {"city": "Phoenix", "unit": "fahrenheit"})]),
    ("tool call", "Resize photo beach.png to a width of 800 and a height of 600.", [("resize_photo", {"file": "beach.png", "width": 800, "height": 600})]),
    ("tool call", "Look up the zorvath with code QX-991.", [("zorvath_lookup", {"code": "QX-991"})]),
    ("two tool calls", "What's the weather in Oslo and in Tromso?", [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Tromso"})]),
    ("two tool calls", "Assign ticket 77 to Wilhelmina and ticket 78 to Cornelius.", [("assign_ticket", {"ticket_id": 77, "agent": "Wilhelmina"}), ("assign_ticket", {"ticket_id": 78, "agent": "Cornelius"})]),
    ("two tool calls", "Set the oven to 200 degrees and mute the microphone.", [("set_oven", {"temperature": 200}), ("mute_microphone", {"muted": True})]),
    ("two tool calls", "Look up zorvath A12 and also zorvath B34.", [("zorvath_lookup", {"code": "A12"}), ("zorvath_lookup", {"code": "B34"})]),
    ("no tool call", "Hello! How are you?", []),
    ("no tool call", "What is the capital of Austria?", []),
    ("no tool call", "Tell me a joke.", []),
    ("no tool call", "What is the opposite of dark?", []),
    ("no tool call", "Book me a flight to Rome.", []),
)  # fmt: skip
_RECALL: Final[tuple[tuple[list[str], str, tuple[str, ...]], ...]] = (
    (["Hi, my name is Ottoline.", "OK.", "What is the capital of Italy?", "Rome."], "Do you remember what I am called?", ("ottoline",)),
    (["My favorite color is teal.", "Nice!", "What is 4 + 4?", "8", "Tell me a joke.", "Why did the computer get cold? It left its windows open."], "Which color do I like?", ("teal",)),
    (["I live in Brackwater.", "Noted."], "Which city do I live in?", ("brackwater",)),
    (["My lucky number is 5178.", "Got it.", "Hello", "Hello! How can I help you?"], "What is my lucky number?", ("5178",)),
    (["I'm Bartholomew and I live in Ravenmoor.", "Nice to meet you!", "Spell cat.", "c-a-t"], "Where do I live?", ("ravenmoor",)),
    (["My dog is called Pumpernickel.", "Cute!", "What color is snow?", "White."], "What is my dog's name?", ("pumpernickel",)),
)  # fmt: skip
_RESULTS: Final[tuple[tuple[str, str, dict[str, Any], str, tuple[str, ...]], ...]] = (
    ("What's the weather in Oslo?", "get_weather", {"city": "Oslo"}, '{"city": "Oslo", "temperature": 7, "condition": "cloudy"}', ("7", "cloudy")),
    ("Assign ticket 12 to Rosalind.", "assign_ticket", {"ticket_id": 12, "agent": "Rosalind"}, '{"success": true, "assigned_to": "Rosalind"}', ("rosalind",)),
    ("Look up the zorvath with code K9.", "zorvath_lookup", {"code": "K9"}, "The zorvath K9 was built in 1934 by Cornelius.", ("1934", "cornelius")),
    ("Find a train from Ravenmoor to Brackwater.", "lookup_train", {"from_station": "Ravenmoor", "to_station": "Brackwater"}, '{"departure": "14:25", "platform": 6}', ("14:25", "6")),
)  # fmt: skip


def _tool(name: str) -> dict[str, Any]:
    about, properties, required = _TOOLS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _box(names: list[str], place: int) -> list[dict[str, Any]]:
    """The named tools and two others."""
    every = list(_TOOLS)
    others = [every[(place * 2 + i) % len(every)] for i in range(len(every))]
    chosen = list(dict.fromkeys(names)) + [n for n in others if n not in names][:2]
    return [_tool(name) for name in sorted(chosen)]


def samples(category: str) -> list[Sample]:
    made = [
        Sample(
            kind,
            [{"role": "user", "content": user}, {"role": "assistant", "content": answer}],
            check,
            keys,
            skill="by hand",
        )
        for kind, user, answer, check, keys in _ONE
        if kind == category
    ]
    for place, (kind, user, calls) in enumerate(_CALLS):
        if kind == category:
            answer: dict[str, Any] = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
            }
            made.append(
                Sample(
                    kind,
                    [{"role": "user", "content": user}, answer],
                    "calls",
                    tools=_box([n for n, _ in calls], place),
                    skill="by hand",
                )
            )
    if category == "multi-turn":
        for history, question, keys in _RECALL:
            messages = [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate([*history, question, ""])
            ]
            made.append(Sample(category, messages, "contains", keys, skill="by hand"))
    if category == "tool results":
        for place, (user, name, arguments, raw, keys) in enumerate(_RESULTS):
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
            messages = [
                {"role": "user", "content": user},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": raw},
                {"role": "assistant", "content": ""},
            ]
            made.append(Sample(category, messages, "contains", keys, tools=_box([name], place), skill="by hand"))
    return made
