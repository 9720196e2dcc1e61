"""`mlxctl repack`, and a daemon that serves what it has written: a small model of experts, a real worker."""

from pathlib import Path

import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.models import build
from tests.support.scale import patient


def config(home: Path, *tables: str) -> None:
    (home / "mlxd.toml").write_text("\n".join(["[server]\nport = 0", *tables]))


def test_a_repacked_model_is_served_from_disk_with_the_same_text_and_counted(tmp_path: Path) -> None:
    path = build("qwen3_moe", tmp_path / "moe", num_experts=8)
    config(tmp_path, f'[models.moe]\npath = "{path}"')
    done = ctl(tmp_path, "repack", "moe")
    assert done.returncode == 0, done.stderr
    disk = tmp_path / "repacked" / "moe"
    assert f'path = "{disk}"' in done.stdout
    assert ctl(tmp_path, "repack", "moe").returncode == 1, "the folder is there already"

    config(
        tmp_path,
        f'[models.moe]\npath = "{path}"',
        f'[models.disk]\npath = "{disk}"\nexperts = "disk"',
    )
    info = ctl(tmp_path, "info", "disk")
    assert "in memory, the others are read from disk" in info.stdout
    with DaemonProcess(tmp_path, module="gateway.main") as daemon:
        body = {"prompt": "to mi ra", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        texts = [
            daemon.client.post("/v1/completions", json={"model": model} | body, timeout=patient(60)).json()["choices"]
            for model in ("moe", "disk")
        ]
        assert texts[0][0]["text"] == texts[1][0]["text"]
        metrics = daemon.client.get("/metrics").text
    counted = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if 'model="disk"' in line or 'model_name="disk"' in line
    }
    assert counted["mlxd_expert_misses_total"] > 0
    assert counted["mlxd_expert_cache_bytes"] > 0


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('experts = "disk"\nmax_running = 3', "max_running"),
        ('experts = "disk"\nspeculate = "auto"', "speculate"),
        ('experts = "disk"\ndraft = "demo"', "draft"),
        ('experts = "disk"\ndraft = "demo"\nsparse_prefill = 0.5', "draft"),
        ('experts = "flash"', "experts"),
    ],
)
def test_settings_that_experts_on_disk_cannot_have_are_refused(tmp_path: Path, table: str, reason: str) -> None:
    config(tmp_path, f'[models.moe]\npath = "demo"\n{table}')
    done = ctl(tmp_path, "config", "check")
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
