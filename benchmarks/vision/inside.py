"""Costs inside of a worker's process: a feature hit beside an encode, and text of a vision model beside a text model.

Both models are the demo's: its folder as it is, and without the section of its tower, which makes it a text model. The
tokens are asserted to be the same. CPU time is that of the process, by turns.
"""

import json
import random
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import blas
from gateway.ctl.bench.closed_loop import table

if TYPE_CHECKING:
    from worker.model.loader import LoadedModel
    from worker.vision.media import Medium

DEMO: Final = blas.ROOT / "worker" / "demo_vision"
LOOKUPS: Final = 20_000
ROWS: Final = 4
PROMPT: Final = 64
TOKENS: Final = 160


def report(turns: int, side: int) -> str:
    """Measure both, and format their tables."""
    whole = _load(DEMO)
    with tempfile.TemporaryDirectory(prefix="mlxd-") as folder:
        text = _load(_as_text(Path(folder)))
        assert text.vision is None
        ratios = [_text_ratio(whole, text, turn) for turn in range(turns)]
    read_ms, decode_ms, encode_ms, lookup_ms = _feature_hit(whole, side)
    hit_ms = read_ms + lookup_ms
    header = ["header and key, ms", "lookup, ms", "decode, ms", "encode, ms", "encode ÷ lookup", "miss ÷ hit"]
    row = [
        f"{read_ms:.3f}", f"{lookup_ms:.5f}", f"{decode_ms:.1f}", f"{encode_ms:.1f}", f"{encode_ms / lookup_ms:,.0f}",
        f"{(read_ms + decode_ms + encode_ms) / hit_ms:,.0f}",
    ]  # fmt: skip
    middle, spread = statistics.median(ratios), f"{min(ratios):.3f}-{max(ratios):.3f}"
    return (
        f"\nan image of {side} × {side}, CPU time\n{table(header, [row])}\n\n"
        f"CPU of a step of text, vision model ÷ text model, {turns} pairs by turns: {middle:.3f} ({spread})"
    )


def _load(folder: Path) -> "LoadedModel":
    from protocol.spec import WorkerSpec
    from worker.model.loader import load

    return load(WorkerSpec("bench", str(folder), 1, "", ""), lambda *_: None)


def _as_text(folder: Path) -> Path:
    """Copy the demo without the section of its tower."""
    for file in DEMO.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _feature_hit(loaded: "LoadedModel", side: int) -> tuple[float, float, float, float]:
    """Return the milliseconds to read a header, to decode, to encode, and to find stored features."""
    from worker.vision.encoder import FeatureCache

    assert loaded.vision is not None
    media, prompts = _picture(side), _intake(loaded)
    read_ms = _ms(lambda: prompts.read(media), 200)
    medium: Medium = prompts.read(media).media[0]
    pixels = medium.load()
    decode_ms = _ms(medium.load, 5)
    tower = loaded.vision.tower
    features = tower.encode(medium.kind, medium.tokens, pixels)
    encode_ms = _ms(lambda: tower.encode(medium.kind, medium.tokens, pixels), 5)
    cache = FeatureCache(1 << 30)
    for other in range(256):  # a busy worker stores as many
        cache.put(other.to_bytes(32, "little"), features, set())
    cache.put(medium.key, features, set())

    def look_up() -> None:
        assert cache.hold(1, medium.key) is features
        cache.release(1, medium.key)

    return read_ms, decode_ms, encode_ms, _ms(look_up, LOOKUPS)


def _picture(side: int) -> Any:
    from worker.tools.verify.verifier import picture

    return picture(1, side // 24, side // 24)


def _intake(loaded: "LoadedModel") -> Any:
    """Return the processor of the model's media."""
    from worker.prompt.encode import PromptEncoder
    from worker.prompt.media_prompt import MediaPrompts, open_media
    from worker.vision.images import MediaLimits

    media = open_media(loaded, PromptEncoder(loaded.tokenizer), MediaLimits(1 << 26, 16, 1 << 26), 0)
    assert isinstance(media, MediaPrompts), media.reason
    return media.processor


def _ms(act: Any, count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        act()
    return 1000 * (time.process_time() - began) / count


def _text_ratio(vision: "LoadedModel", text: "LoadedModel", turn: int) -> float:
    """Return the ratio of the CPU times of the same rows on both models; they go first by turns."""
    pair = [vision, text] if turn % 2 else [text, vision]
    (first, ids), (second, others) = (_decode(loaded, turn) for loaded in pair)
    assert ids == others, "the vision model says something else of text"
    return first / second if turn % 2 else second / first


def _decode(loaded: "LoadedModel", turn: int) -> tuple[float, list[list[int]]]:
    """Return the median CPU seconds of a step of text rows, and the tokens."""

    from protocol.from_worker import Step, Up
    from protocol.spec import WorkerSpec
    from protocol.to_worker import Generate, Sampling, TokensPrompt
    from worker.prompt.intake import Intake
    from worker.tools.verify.verifier import EngineSession

    class Timed(EngineSession):
        times: list[float]

        def _receive(self, message: Up) -> None:
            if isinstance(message, Step):
                self.times.append(time.process_time())
            super()._receive(message)

    spec = WorkerSpec("bench", "", 1, "", "", cache_bytes=0, kv_bytes=1 << 30, speculate="off")
    draw = random.Random(turn)
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    requests = [
        Generate(rid, TokensPrompt(tuple(draw.randrange(5, 2500) for _ in range(PROMPT))), sampling, max_tokens=TOKENS)
        for rid in range(1, ROWS + 1)
    ]
    session = Timed(loaded, Intake(loaded), spec)
    session.times = []
    outputs = session.run([requests])
    # Rows join during the first steps, which are left out.
    steps = [after - before for before, after in pairwise(session.times[ROWS + 1 :])]
    return statistics.median(steps), [output.ids for output in outputs]
