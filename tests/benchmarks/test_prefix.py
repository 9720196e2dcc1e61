"""The prefix benchmark's arithmetic, and its worker on a tiny model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.prefix import Prefix, as_table, measure_look_up
from benchmarks.prefix_worker import Answer, Order


def test_a_look_up_finds_the_half_that_is_known() -> None:
    measured = measure_look_up(2000)
    assert measured.tokens == 2000
    assert measured.mlxd_s > 0
    assert measured.mlx_lm_s > 0


def test_the_table_shows_fractions_of_cold() -> None:
    result = Prefix("mlxd", 1024, 2.0, 0.02, None, 3.0, 4, 2.5, (1023, 0, 1023), True)
    row = " ".join(as_table([result]).splitlines()[1].split())
    assert row == "mlxd 1024 2.00 0.020 1/100 - - 3.000 1.50 1023/0/1023 2.50 1.25 yes"


def test_the_worker_answers_from_memory_and_from_disk(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = "mira kato sen luto por vide anka tomi " * 20
    orders = [Order([prompt], 4), Order([prompt], 4), Order([prompt], 4, forget=True)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.prefix_worker", str(model_folder("qwen3")), str(tmp_path)],
        input=b"".join(msgspec.json.encode(order) + b"\n" for order in orders),
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"},
        timeout=60,
        check=True,
    )
    first, *rest = done.stdout.splitlines()
    assert first == b"ready"
    cold, warm, disk = (msgspec.convert(json.loads(line), list[Answer])[0] for line in rest)
    assert cold.text == warm.text == disk.text
    assert cold.cached == 0
    assert warm.cached == disk.cached > 64
