"""Ranges of sampling parameters in the bodies of all dialects and in the settings, compared with those on the wire."""

import pytest
from msgspec import Struct, inspect

from gateway.api.anthropic.request import MessagesRequest
from gateway.api.ollama.request import OllamaOptions
from gateway.api.openai.request import SamplingFields
from gateway.api.responses.request import ResponsesRequest
from gateway.config.settings import SamplingDefaults
from protocol.to_worker import Sampling

_Range = tuple[float, float]
# Values that turn a parameter off in a dialect, below the range on the wire.
_OFF = {"top_k": -1, "top_n_sigma": -1}


def ranges(struct: type[Struct]) -> dict[str, _Range]:
    """Return the range of each field with a number, apart from the seed."""
    return {each.name: found for each in inspect.type_info(struct).fields if (found := range_of(each.type)) is not None}


def range_of(type_: inspect.Type) -> _Range | None:
    if isinstance(type_, inspect.UnionType):
        found = [each for each in map(range_of, type_.types) if each is not None]
        return (min(low for low, _ in found), max(high for _, high in found)) if found else None
    if not isinstance(type_, inspect.IntType | inspect.FloatType):
        return None
    low = type_.ge if type_.ge is not None else type_.gt
    return None if low is None or type_.le is None else (low, type_.le)


WIRE = {name: found for name, found in ranges(Sampling).items() if name != "seed"}


@pytest.mark.parametrize("struct", [SamplingFields, MessagesRequest, OllamaOptions, ResponsesRequest, SamplingDefaults])
def test_no_body_and_no_setting_has_a_value_that_a_worker_refuses(struct: type[Struct]) -> None:
    own = ranges(struct)
    shared = own.keys() & WIRE.keys()
    assert {"temperature", "top_p", "top_k"} <= shared
    for name in shared:
        low, high = WIRE[name]
        assert own[name][1] <= high, name
        assert own[name][0] >= low or own[name][0] == _OFF.get(name), name
