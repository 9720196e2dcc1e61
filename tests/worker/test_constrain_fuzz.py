"""Random schemas, sound and broken: what is answered validates, what is refused is an invalid request.

MLXD_FUZZ_SCHEMAS sets how many (400 in about a minute); the default is a sample.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jsonschema
from jsonschema.validators import Draft202012Validator

from protocol.failures import Code
from protocol.messages import Constraint, ConstraintKind, Finish, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.schemas import Schemas

COUNT = int(os.environ.get("MLXD_FUZZ_SCHEMAS", "60"))
BATCH = 16


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


def request(rid: int, schema: object) -> Generate:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    return Generate(
        rid,
        TokensPrompt((20, 30, rid % 500)),
        Sampling(temperature=1.0, seed=rid),
        max_tokens=96,
        constraint=constraint,
    )


def validate(text: str, schema: dict[str, object]) -> None:
    value = json.loads(text)
    try:
        Draft202012Validator(schema).validate(value)
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{text!r} does not fit {json.dumps(schema)}: {error.message}") from error
