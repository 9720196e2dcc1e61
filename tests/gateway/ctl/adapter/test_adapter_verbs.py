"""`mlxctl adapter` against a real daemon and its worker, and `mlxctl info` of a model with adapters."""

import json
from pathlib import Path

from tests.support.adapters import mlx_adapter
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.models import build
from tests.support.pool import short_home


def test_adapters_are_shown_loaded_and_unloaded_from_the_shell(tmp_path: Path) -> None:
    model = build("qwen3", tmp_path / "model")
    sql = mlx_adapter(tmp_path / "sql", model)
    with short_home() as home:
        mlx_adapter(home / "adapters" / "v2", model, seed=2, rank=6)
        (home / "mlxd.toml").write_text(
            f'[server]\nport = 0\n[models.m]\npath = "{model}"\n'
            f'[models.m.adapters]\nsql = "{sql}"\ngone = "{tmp_path}/gone"\n'
        )
        told = json.loads(ctl(home, "info", "m", "--json").stdout)["adapters"]
        assert told == {"sql": (sql / "adapters.safetensors").stat().st_size, "gone": 0}
        assert "gone (not here)" in ctl(home, "info", "m").stdout
        with DaemonProcess(home, module="gateway.main"):
            before = json.loads(ctl(home, "adapter", "--json").stdout)["adapters"]
            assert [(each["name"], each["state"]) for each in before] == [("sql", "unloaded"), ("gone", "unloaded")]
            loaded = ctl(home, "adapter", "load", "new", "v2")
            assert (loaded.returncode, loaded.stdout) == (0, "m:new is loaded: lora, rank 6\n"), loaded.stderr
            shown = ctl(home, "adapter")
            assert [line.split()[:4] for line in shown.stdout.splitlines()] == [
                ["ADAPTER", "STATE", "KIND", "RANK"],
                ["m:sql", "loaded", "lora", "4"],
                ["m:gone", "failed", "-", "-"],
                ["m:new", "loaded", "lora", "6"],
            ]
            assert "there is no folder" in shown.stderr
            assert ctl(home, "chat", "m:new", "hi", "--max-tokens", "2").returncode == 0
            refused = ctl(home, "adapter", "load", "other", str(sql))
            assert refused.returncode == 1
            assert "adapter_folders" in refused.stderr
            assert ctl(home, "adapter", "unload", "new").stdout == "m:new is unloaded\n"
            assert ctl(home, "adapter", "unload", "new").returncode == 1
            log = (home / "logs" / "audit.log").read_text()
            assert '"adapter.load","target":"m:new","outcome":"ok"' in log.replace(" ", "")
