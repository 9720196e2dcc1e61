"""Adapters that come and go while an engine runs: what runs with one that goes finishes with it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.failures import Code
from protocol.from_worker import AdapterInfo, AdaptersSet, Finish
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.adapters import greedy, mlx_adapter, reference
from tests.support.engine import EngineHarness, spec
from worker.engine.inbox import AdapterOrder
from worker.model.lora.adapters import read_all

PROMPT = tuple(range(20, 60))


class Orders:
    """Orders to an engine, and its answers."""

    def __init__(self, engine: EngineHarness) -> None:
        self._engine = engine
        self.answers: list[AdaptersSet] = []

    def set(self, *wanted: tuple[str, str]) -> dict[str, AdapterInfo]:
        """Have these adapters; what there is then."""
        call_id = len(self.answers) + 100
        assert self._engine.adapters is not None
        order = AdapterOrder(call_id, wanted, read_all(self._engine.adapters, wanted), self._take)
        self._engine.command(order)
        self._engine.wait(lambda: any(each.call_id == call_id for each in self.answers), "the answer")
        answer = next(each for each in self.answers if each.call_id == call_id)
        return {info.name: info for info in answer.adapters}

    def _take(self, answer: AdaptersSet) -> None:
        with self._engine.changed:
            self.answers.append(answer)
            self._engine.changed.notify_all()


def request(rid: int, adapter: str, tokens: int = 8) -> Generate:
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    return Generate(rid, TokensPrompt(PROMPT), sampling, max_tokens=tokens, adapter=adapter)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> dict[str, str]:
    root, model = tmp_path_factory.mktemp("adapters"), model_folder("qwen3")
    small, large = mlx_adapter(root / "small", model, rank=2), mlx_adapter(root / "large", model, seed=2, rank=16)
    return {"small": str(small), "large": str(large)}


def test_adapters_are_loaded_and_unloaded_while_others_run(
    model_folder: Callable[[str], Path], folders: dict[str, str]
) -> None:
    model = model_folder("qwen3")
    expected = {name: greedy(reference(model, Path(path)), PROMPT, 8) for name, path in folders.items()}
    small, large = ("one", folders["small"]), ("two", folders["large"])
    with EngineHarness(spec(model, cache_bytes=0)) as engine:
        orders, base = Orders(engine), engine.run([request(1, "")])[0].ids
        assert [each.failure.code for each in engine.run([request(2, "one")]) if each.failure] == [Code.MODEL_MISSING]
        assert orders.set(small)["one"].nbytes > 0
        assert engine.run([request(3, "one")])[0].ids == expected["small"]
        first = orders.answers[-1].weights_bytes
        # While it is loaded a row of the first runs, which a larger rank must not disturb.
        running = engine.submit(request(4, "one", 200))
        engine.wait(lambda: len(running.ids) > 4, "some tokens")
        assert orders.set(large, small).keys() == {"one", "two"}
        assert orders.answers[-1].weights_bytes > first
        assert [each.ids for each in engine.run([request(5, "two"), request(6, ""), request(7, "one")])] == [
            expected["large"], base, expected["small"],
        ]  # fmt: skip
        # One that goes takes no new requests, and is let go of when the last row that has it has ended.
        assert orders.set(large).keys() == {"two"}
        assert [each.failure.code for each in engine.run([request(8, "one")]) if each.failure] == [Code.MODEL_MISSING]
        engine.wait(lambda: running.terminals == 1, "the end of the running row")
        assert running.finish is Finish.LENGTH
        assert running.ids == greedy(reference(model, Path(folders["small"])), PROMPT, 200)
        assert orders.set() == {}
        engine.wait(lambda: engine.adapters is not None and not engine.adapters.is_on, "an empty model")
        assert engine.run([request(9, "")])[0].ids == base


def test_an_adapter_that_cannot_be_served_says_why_and_changes_nothing(
    model_folder: Callable[[str], Path], folders: dict[str, str], tmp_path: Path
) -> None:
    good, bad = ("one", folders["small"]), ("bad", str(tmp_path / "absent"))
    with EngineHarness(spec(model_folder("qwen3"), adapters=(bad, good))) as engine:
        orders = Orders(engine)
        assert engine.adapters is not None
        told = {info.name: info.failure for info in engine.adapters.infos}
        assert told["one"] is None
        assert told["bad"] is not None
        assert "there is no folder" in told["bad"].message
        refused = engine.run([request(1, "bad")])[0].failure
        assert refused is not None
        assert refused.message == told["bad"].message
        assert engine.run([request(2, "one")])[0].failure is None
        # Once it is there, the same order loads it.
        mlx_adapter(tmp_path / "absent", model_folder("qwen3"), seed=3)
        assert orders.set(bad, good)["bad"].failure is None
        assert engine.run([request(3, "bad")])[0].failure is None


def test_an_adapter_that_leaves_no_memory_for_kv_is_retired(
    model_folder: Callable[[str], Path], folders: dict[str, str]
) -> None:
    model = model_folder("qwen3")
    with EngineHarness(spec(model, kv_bytes=1)) as engine:
        info = Orders(engine).set(("one", folders["large"]))["one"]
        assert info.failure is not None
        assert info.failure.code is Code.OUT_OF_MEMORY
        assert engine.adapters is not None
        assert not engine.adapters.is_on
