"""Random schemas, sound and broken: what is answered validates, what is refused is an invalid request.

MLXD_FUZZ_SCHEMAS sets how many (400 in about a minute); the default of `make test` is a sample.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from protocol import codec
from protocol.failures import Code
from protocol.from_worker import Finish, Rejected
from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.schemas import Schemas, doubled, errors_of
from worker.errors import RequestInvalid
from worker.structured.grammar_compiler import CompiledGrammar, GrammarFailed, Grammars, lark_json

COUNT = int(os.environ.get("MLXD_FUZZ_SCHEMAS", "400"))
BATCH = 16


@pytest.mark.fuzz
def test_random_schemas_are_enforced_or_refused(model_folder: Callable[[str], Path]) -> None:
    schemas = [Schemas(seed).make() for seed in range(COUNT)]
    answered = refused = 0
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        for start in range(0, COUNT, BATCH):
            batch = schemas[start : start + BATCH]
            results = engine.run([request(start + at, schema) for at, schema in enumerate(batch)])
            for schema, result in zip(batch, results, strict=True):
                if result.failure is not None:
                    assert result.failure.code is Code.INVALID_REQUEST, (schema, result.failure)
                    assert result.failure.param == "response_format"
                    refused += 1
                elif result.finish is Finish.STOP:
                    validate(result.text, schema)
                    answered += 1
                else:
                    assert result.finish is Finish.LENGTH, schema
    assert answered > COUNT / 4
    assert refused > COUNT / 10


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/x", "x": {"type": "integer", "multipleOf": 9999991}}, "points to no schema"),
        (doubled(40), "refer to too much"),
        ({"type": "string", "allOf": [{"pattern": f".*a.{{{at}}}"} for at in range(10, 30)]}, "patterns or formats"),
        ({"enum": [str(at) for at in range(3000)], "pattern": "a.{20}"}, "values beside a pattern"),
        ({"properties": {f"p{at}": {} for at in range(8000)}}, "more than 2000 entries"),
        ({"const": 2**53 + 1}, "beyond 2^53"),
        ({"minimum": 2**63, "maximum": 2**63 + 10}, "beyond 64 bits"),
        ({"maximum": 10**400}, "too large"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "pattern": "[a-z&&[^b]]"}, "inside of brackets"),
        ({"properties": {"\ud800": {}}}, "not text"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "minContains": 1}, "minContains"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_llguidance_would_not_hold_or_not_end_with_is_refused_at_once(
    grammars: Grammars, schema: Any, reason: str
) -> None:
    started = time.thread_time()
    with pytest.raises(RequestInvalid, match=re.escape(reason)) as refused:
        grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    codec.encode(Rejected(1, refused.value.failure))
    assert time.thread_time() - started < 2.0


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/x", "x": {"multipleOf": 9999991}}, {"allOf": [{"$ref": "#/$defs/d0"}], **doubled(40)}]
)
def test_a_schema_inside_of_a_grammar_is_bounded_too(grammars: Grammars, schema: Any) -> None:
    for text in ("start: %json " + json.dumps(schema), "start: " + lark_json(schema)):
        with pytest.raises(RequestInvalid):
            grammars.compile(Constraint(ConstraintKind.GRAMMAR, text))


@pytest.mark.parametrize(
    ("schema", "wrong", "right"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.09}, "0", "0.01"),
        ({"type": "number", "exclusiveMaximum": -7, "minimum": -7.5}, "-7", "-7.1"),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1.2000000000000002}, "1.20000000000000012", "1.1"),
        ({"type": "integer", "minimum": 0, "maximum": 2**53 + 3}, "9007199254740996", "9007199254740899"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "9223372036854775808", "9007199254740993"),
        ({"properties": {"a": {"type": "null"}}, "type": "object"}, '{"\\u0061": 1}', '{"b": 1}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"const": 1}]}, "[2]", "[1]"),
        ({"type": "object", "minProperties": 1, "required": ["a"]}, "{}", '{"a": 1}'),
    ],
)
def test_what_llguidance_holds_only_nearly_is_held(grammars: Grammars, schema: Any, wrong: str, right: str) -> None:
    grammar = grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    walk = grammar.walk()
    try:
        walk.take_bytes(text.encode())
    except GrammarFailed:
        return False
    return walk.is_complete


@pytest.fixture(scope="module")
def grammars(model_folder: Callable[[str], Path]) -> Grammars:
    tokenizer = load_tokenizer(model_folder("qwen3"))
    return Grammars(tokenizer, 512, sorted(tokenizer.eos_token_ids))


def request(rid: int, schema: object) -> Generate:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    return Generate(
        rid,
        # Printable ASCII: a prompt that ended inside of a character would begin the text with that character.
        TokensPrompt((20, 30, 20 + rid % 60)),
        Sampling(temperature=1.0, seed=rid),
        max_tokens=96,
        constraint=constraint,
    )


def validate(text: str, schema: dict[str, object]) -> None:
    problem = errors_of(json.loads(text), schema)
    assert problem is None, f"{text!r} does not fit {json.dumps(schema)}: {problem}"
