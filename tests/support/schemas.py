"""Random JSON schemas, sound and broken."""

import random
from typing import Any

_FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "no-such-format"]
_PATTERNS = ["^[a-z]{1,4}$", "b+", "^(foo|bar)$", r"^\d{2}-\d{2}$", "(", "(?=x)y", "^[^ ]+$"]
_ODD = [None, True, -1, 2.5, "x", [], {}, [1], {"a": 1}, 10**30, "", "object"]


class Schemas:
    """`make` gives one schema after the other, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def make(self) -> dict[str, Any]:
        """About a third of them are damaged."""
        schema = self._schema(depth=self._rng.randint(0, 3))
        for _ in range(self._rng.choice([0, 0, 0, 0, 1, 2])):
            self._damage(schema)
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._number, self._integer, self._choice, lambda: {"type": "boolean"}]
        leaves.append(lambda: {"type": "null"})
        if depth == 0:
            return self._rng.choice(leaves)()
        kind = self._rng.choice([*leaves[:2], self._object, self._object, self._array, self._any, self._refs])
        return kind(depth) if kind in (self._object, self._array, self._any, self._refs) else kind()

    def _string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        match self._rng.randrange(5):
            case 0:
                schema["maxLength"] = self._rng.choice([0, 1, 5, 40])
                schema["minLength"] = self._rng.choice([0, 0, 1, 6])
            case 1:
                schema["pattern"] = self._rng.choice(_PATTERNS)
            case 2:
                schema["format"] = self._rng.choice(_FORMATS)
            case _:
                schema["maxLength"] = 8
        return schema

    def _number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self._rng.random() < 0.5:
            low = self._rng.randint(-100, 100)
            schema |= {
                "minimum": low,
                self._rng.choice(["maximum", "exclusiveMaximum"]): low + self._rng.randint(-1, 50),
            }
        return schema

    def _integer(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer", "minimum": self._rng.randint(-5, 5), "maximum": 1000}
        if self._rng.random() < 0.3:
            schema["multipleOf"] = self._rng.choice([1, 3, 7, 100, 0, -2, 1000003])
        return schema

    def _choice(self) -> dict[str, Any]:
        values = [1, "one", None, True, 2.5, "né 🙂", {"a": [1]}, [], 'q"\\']
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(0, 5))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(["a", "b", "name", "né", "x y", 'q"', ""], self._rng.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth - 1) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
        }
        match self._rng.randrange(6):
            case 0 | 1 | 2:
                schema["additionalProperties"] = False
            case 3:
                schema["additionalProperties"] = self._schema(0)
            case 4:
                schema["patternProperties"] = {"^p[0-9]$": self._schema(0)}
            case _:
                schema[self._rng.choice(["minProperties", "maxProperties"])] = self._rng.randint(0, 3)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth - 1)}
        match self._rng.randrange(6):
            case 0:
                schema["prefixItems"] = [self._schema(0), self._schema(0)]
                schema["maxItems"] = 3
            case 1:
                schema["uniqueItems"] = True
            case 2:
                schema["contains"] = {"type": "string"}
            case _:
                schema["minItems"], schema["maxItems"] = self._rng.choice([(0, 2), (1, 1), (2, 3), (3, 2)])
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        parts = [self._schema(depth - 1) for _ in range(self._rng.randint(1, 3))]
        return {self._rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "not"]): parts}

    def _refs(self, depth: int) -> dict[str, Any]:
        target = self._rng.choice(["#/$defs/one", "#/$defs/one", "#/$defs/none", "#", "http://example.com/schema"])
        return {
            "$defs": {"one": self._schema(depth - 1)},
            "type": "object",
            "properties": {"it": {"$ref": target}},
            "required": self._rng.choice([[], ["it"]]),
            "additionalProperties": False,
        }

    def _damage(self, schema: dict[str, Any]) -> None:
        """Put something odd in the place of one value, at any depth."""
        holder: Any = schema
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                return
            key = self._rng.choice(keys)
            if isinstance(holder[key], dict | list) and self._rng.random() < 0.6:
                holder = holder[key]
                continue
            holder[key] = self._rng.choice(_ODD)
            return
