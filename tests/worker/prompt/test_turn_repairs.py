"""Whatever turns a client sends in whatever order, a template renders all of them, and only those it refuses change."""

import re
from itertools import count, pairwise, product
from typing import Any

import pytest

from protocol.to_worker import ChatPrompt
from tests.support.scale import scaled
from tests.worker.prompt.test_templates import Tokenizer
from worker.errors import RequestInvalid
from worker.prompt.rewrites import results_in_order
from worker.prompt.templates import Renderer

Turns = list[dict[str, Any]]
WORD = re.compile(r"[A-Z]+-\d+W")
LISTED = {"type": "function", "function": {"name": "TOOL-0W", "parameters": {"type": "object", "properties": {}}}}

HEAD = "{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}"
CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
)
LINE = "{{- '[' + m.role + ']' + m.content }}" + CALLS + "</s>"
EACH = HEAD + "{%- for m in messages %}"
PLAIN = EACH + LINE + "{%- endfor %}"
# Mistral's rule: user and assistant alternate, calls and results aside.
ALTERNATING = (
    "{%- set ns = namespace(n=0) %}{%- for m in messages if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- set ns.n = ns.n + 1 %}{%- endfor %}"
) + PLAIN
# The same without a role for the system, and without text beside calls.
ALTERNATING_CALLS = ALTERNATING.replace(
    "'[' + m.role + ']' + m.content", "'[' + m.role + ']' + (m.content if not m.tool_calls else '')"
).replace(
    "{%- for m", "{%- for m in messages if m.role == 'system' %}{{ raise_exception('none') }}{% endfor %}{%- for m", 1
)
NO_EMPTY = (
    "{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
)
BEHIND_CALLS = (
    EACH
    + (
        "{%- if m.role == 'tool' and (loop.first or not (messages[loop.index0 - 1].role == 'tool' or "
        "messages[loop.index0 - 1].tool_calls)) %}{{ raise_exception('no call before the result') }}{% endif %}"
    )
    + LINE
    + "{%- endfor %}"
)
BEHIND_OWN_CALLS = (
    "{%- set ns = namespace(ids=[]) %}"
    + EACH
    + (
        "{%- if m.role == 'tool' and m.tool_call_id not in ns.ids %}{{ raise_exception('whose result?') }}{% endif %}"
        "{%- if m.role != 'tool' %}{%- set ns.ids = (m.tool_calls or []) | map(attribute='id') | list %}{%- endif %}"
    )
    + LINE
    + "{%- endfor %}"
)
# Gemma's way: a message with calls shows the results behind it; other results are dropped.
SCANNED = EACH + (
    "{%- if m.role != 'tool' %}" + LINE + "{%- set ns = namespace(on=m.tool_calls) %}"
    "{%- for r in messages[loop.index:] %}{%- set ns.on = ns.on and r.role == 'tool' %}"
    "{%- if ns.on %}{{- '[tool]' + r.content }}{%- endif %}{%- endfor %}{%- endif %}{%- endfor %}"
)
DROPS_LAST_CALL = EACH + "{%- if not (loop.last and m.tool_calls) %}" + LINE + "{%- endif %}{%- endfor %}"
FIRST_IS_THE_USERS = HEAD + (
    "{%- set head = 1 if messages[0].role == 'system' else 0 %}{{- messages[0].content if head }}"
    "{{- '[user]' + messages[head].content }}{%- for m in messages[head + 1:] %}" + LINE + "{%- endfor %}"
)  # fmt: skip
NEEDS_A_USER = (
    "{%- if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
)
# Harmony's way: text beside calls is dropped as soon as an answer follows.
DROPS_EARLIER_WORDS = EACH + (
    "{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') %}"
    "{%- set later = later | list %}"
    "{{- '[' + m.role + ']' + ('' if m.tool_calls and later else m.content) }}" + CALLS + "</s>{%- endfor %}"
)  # fmt: skip

# Also Mistral's: the tools stand beside the last message of a user.
TOOLS_BESIDE_USER = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages if m.role == 'user' %}{%- set ns.last = m %}{%- endfor %}"
    "{%- for m in messages %}{%- if m == ns.last %}" + HEAD + "{%- endif %}" + LINE + "{%- endfor %}"
)

TEMPLATES = {
    "takes all": PLAIN,
    "roles alternate": ALTERNATING,
    "roles alternate, calls have no text": ALTERNATING_CALLS,
    "no empty turn": ALTERNATING.replace(LINE, NO_EMPTY + LINE),
    "results behind calls": BEHIND_CALLS,
    "results behind their own calls": BEHIND_OWN_CALLS,
    "roles alternate, results behind their own calls": ALTERNATING.replace(PLAIN, BEHIND_OWN_CALLS),
    "shows only the results behind calls": SCANNED,
    "drops the last call": DROPS_LAST_CALL,
    "the first is the user's": FIRST_IS_THE_USERS,
    "roles alternate, tools beside the last user": ALTERNATING.replace(PLAIN, TOOLS_BESIDE_USER),
    "needs a user": NEEDS_A_USER + PLAIN,
    "drops earlier text beside calls": DROPS_EARLIER_WORDS,
}


def conversation(letters: str) -> Turns:
    """Return turns: S(ystem), U(ser), A(nswer), E(mpty answer), N (reasoning only), C(all), T (text and call), D (text,
    reasoning and call), P(air of calls); r: the oldest open result, l: the latest, o: an orphan. [] if none is open."""
    turns: Turns = []
    numbers = count(1)
    waiting: Turns = []

    def word(kind: str) -> str:
        return f"{kind}-{next(numbers)}W"

    def result(call_id: str, **fields: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": word("RESULT"), **fields}

    for letter in letters:
        if letter in "SU":
            turns.append({"role": {"S": "system", "U": "user"}[letter], "content": word("TURN")})
        elif letter == "o":
            turns.append(result(f"call_gone_{len(turns)}"))
        elif letter in "rl":
            if not waiting:
                return []
            call = waiting.pop(0 if letter == "r" else -1)
            turns.append(result(call["id"], name="get_weather"))
        else:
            turn = {"role": "assistant", "content": word("TEXT") if letter in "ATD" else ""}
            calls = [
                {
                    "id": f"call_{len(turns)}_{n}",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": word("CITY")}},
                }
                for n in range({"C": 1, "T": 1, "D": 1, "P": 2}.get(letter, 0))
            ]
            waiting += calls
            turns.append(
                turn
                | ({"tool_calls": calls} if calls else {})
                | ({"reasoning_content": "hm"} if letter in "ND" else {})
            )
    return turns


LONG = ("UCUrU", "UPrUlU", "UPlUrA", "UTrUTrUA", "UToUA", "CrACrA", "UACrAU", "UAoAU", "CUrCAU", "UPUANA", "UDrEUN")
SEQUENCES = [
    turns
    for letters in (*LONG, *(each for n in range(1, scaled(5, 4)) for each in product("UAECTPrlo", repeat=n)))
    for head in ("", "S")
    if (turns := conversation(head + "".join(letters)))
]


def shown(renderer: Renderer, turns: Turns, *, opens_answer: bool = True) -> str:
    return renderer.render(ChatPrompt(turns, [LISTED]), opens_answer=opens_answer)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_turn_of_every_short_conversation_is_rendered(template: str) -> None:
    renderer = Renderer(Tokenizer(template))
    for turns in SEQUENCES:
        text = shown(renderer, turns)
        assert [word for word in WORD.findall(str([turns, LISTED])) if word not in text] == [], turns


@pytest.mark.parametrize(
    ("results", "rendered"),
    [
        ("abc", "abc"),
        ("cab", "abc"),
        ("b", "-b"),
        ("ca", "a-c"),
        ("ab", "ab"),
        ("", ""),
        # Which call a result belongs to is not known.
        ("bxa", "bxa"),
        ("bba", "bba"),
    ],
)
def test_results_are_in_the_order_of_their_calls(results: str, rendered: str) -> None:
    calls = [
        {"id": letter, "type": "function", "function": {"name": "get_weather", "arguments": {"city": letter}}}
        for letter in "abc"
    ]
    turns: Turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": letter, "content": f"={letter}="} for letter in results),
        {"role": "user", "content": "u"},
    ]
    text = shown(Renderer(Tokenizer(PLAIN)), turns).replace("(no result)", "=-=")

    assert "".join(re.findall(r"=(.)=", text)) == rendered


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_that_a_template_takes_as_it_is_stays_as_it_is(template: str) -> None:
    renderer = Renderer(Tokenizer(template))
    is_taken = 0
    for turns in map(results_in_order, SEQUENCES):
        text = renderer._try(turns, [LISTED])  # pyright: ignore[reportPrivateUsage]
        if text is not None and all(word in text for word in WORD.findall(str([turns, LISTED]))):
            is_taken += 1
            assert shown(renderer, turns) == text
    assert is_taken > 30


@pytest.mark.parametrize(
    "name",
    sorted(TEMPLATES.keys() - {"drops earlier text beside calls", "roles alternate, tools beside the last user"}),
)
def test_each_step_of_an_agent_begins_with_the_prompt_of_the_step_before(name: str) -> None:
    renderer = Renderer(Tokenizer(TEMPLATES[name]))
    letters = "SUTrUTrUPrlUDrAUCrUAU"
    ends = [at for at, letter in enumerate(letters, 1) if letter in "Url"]
    prompts = [shown(renderer, conversation(letters[:end])) for end in ends]

    assert all(after.startswith(before) for before, after in pairwise(prompts))


CALL = '[assistant]<call>get_weather{"city": "CITY-2W"}</s>'


@pytest.mark.parametrize(
    ("letters", "written"),
    [
        ("UCrU", f"[user]TURN-1W</s>{CALL}[tool]RESULT-3W</s>[assistant]Understood.</s>[user]TURN-4W</s>"),
        ("UCU", f"[user]TURN-1W</s>{CALL}[assistant](interrupted)</s>[user]TURN-3W</s>"),
        ("AU", "[user](start of the conversation)</s>[assistant]TEXT-1W</s>[user]TURN-2W</s>"),
        ("UACrAU", '[user]TURN-1W</s>[assistant]TEXT-2W<call>get_weather{"city": "CITY-3W"}</s>[tool]RESULT-4W</s>'
         "[assistant]TEXT-5W</s>[user]TURN-6W</s>"),
    ],
)  # fmt: skip
def test_turns_are_joined_and_short_turns_added_where_roles_must_alternate(letters: str, written: str) -> None:
    assert shown(Renderer(Tokenizer(ALTERNATING)), conversation(letters)) == "TOOL-0W" + written


def test_text_stands_before_its_call_where_the_template_has_no_place_for_it() -> None:
    text = shown(Renderer(Tokenizer(ALTERNATING_CALLS)), conversation("UTrA"))
    assert text.startswith('TOOL-0W[user]TURN-1W</s>[assistant]TEXT-2W<call>get_weather{"city": "CITY-3W"}</s>[tool]')


def test_a_result_without_its_call_gets_one_and_a_late_result_its_own_again() -> None:
    renderer = Renderer(Tokenizer(BEHIND_OWN_CALLS))
    assert shown(renderer, conversation("Uo")).endswith("[assistant]<call>unknown{}</s>[tool]RESULT-2W</s>")
    assert shown(renderer, conversation("UCUr")).endswith(f"[user]TURN-3W</s>{CALL}[tool]RESULT-4W</s>")


def test_calls_at_the_end_are_rendered_as_they_are_where_no_answer_follows() -> None:
    renderer = Renderer(Tokenizer(DROPS_LAST_CALL.replace("loop.last", "loop.last and add_generation_prompt")))
    assert shown(renderer, conversation("UC")).endswith(f"{CALL}[tool](no result)</s>")
    assert shown(renderer, conversation("UC"), opens_answer=False).endswith(CALL)


def test_an_empty_answer_is_left_out_where_the_template_refuses_it_also_if_it_is_to_be_continued() -> None:
    renderer = Renderer(Tokenizer(TEMPLATES["no empty turn"] + "{{- '[go]' if add_generation_prompt }}"))
    assert shown(renderer, conversation("UEUNU")) == "TOOL-0W[user]TURN-1W\n\nTURN-2W\n\nTURN-3W</s>[go]"

    prompt = ChatPrompt(conversation("UCrUE"), [LISTED], continue_final=True)
    assert renderer.render(prompt).endswith("[assistant]Understood.</s>[user]TURN-4W</s>[go]")


def test_a_tool_named_like_the_mark_of_a_text_is_refused_and_no_text_lost() -> None:
    turns = conversation("UTrC")
    turns[-1]["tool_calls"][0]["function"]["name"] = "words_beside_call_0_"
    with pytest.raises(RequestInvalid, match="each text beside its calls"):
        shown(Renderer(Tokenizer(ALTERNATING_CALLS)), turns)
