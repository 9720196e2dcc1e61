import json
import time
from collections.abc import Generator
from pathlib import Path

import httpx2
import pytest

from gateway.access.key import KeyFile
from gateway.command_failed import CommandFailed
from gateway.control_types import DaemonStatus
from gateway.ctl import client
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config


def created(home: Path, *words: str) -> str:
    done = ctl(home, "keys", "create", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def listed(home: Path) -> list[dict[str, object]]:
    return json.loads(ctl(home, "keys", "list", "--json").stdout)


def test_every_verb_has_help_with_an_example(tmp_path: Path) -> None:
    for verb in ("create", "set", "disable", "enable", "list", "revoke", "rotate", "usage"):
        assert "Example: mlxctl keys" in ctl(tmp_path, "keys", verb, "--help").stdout


def test_only_the_secret_is_on_stdout(tmp_path: Path) -> None:
    done = ctl(tmp_path, "keys", "create", "alice")

    assert done.stdout.startswith("sk-mlxd-")
    assert done.stdout.count("\n") == 1
    assert "shown once" in done.stderr


def test_every_option_is_kept(tmp_path: Path) -> None:
    words = "--models qwen* default --models a,b --rpm 60 --tpm 9000 --concurrency 4 --expires 30d --priority -5"
    made = ctl(tmp_path, "keys", "create", "bob", *words.split(), "--share-cache", "--json")
    shown = json.loads(made.stdout)
    [key] = listed(tmp_path)

    assert shown.pop("key").startswith(key["prefix"])
    assert shown == {name: value for name, value in key.items() if name != "last_used"}
    assert key["models"] == ["qwen*", "a", "b", "default"]
    assert (key["rpm"], key["tpm"], key["concurrency"], key["priority"]) == (60, 9000, 4, -5)
    assert key["shares_cache"] is True
    assert key["is_admin"] is False
    assert isinstance(key["expires"], float)
    assert 29.9 * 86400 < key["expires"] - time.time() <= 30 * 86400


def test_a_role_is_kept(tmp_path: Path) -> None:
    created(tmp_path, "prometheus", "--role", "metrics")
    created(tmp_path, "boss", "--role", "admin")
    created(tmp_path, "old", "--admin")
    created(tmp_path, "user", "--role", "user")

    assert [(key["is_metrics_only"], key["is_admin"]) for key in listed(tmp_path)] == [
        (True, False), (False, True), (False, True), (False, False),
    ]  # fmt: skip
    assert "none (metrics)" in ctl(tmp_path, "keys", "list").stdout


def test_what_set_names_changes_and_all_else_stays(tmp_path: Path) -> None:
    created(tmp_path, "bob", "--models", "a", "--rpm", "60", "--expires", "30d")
    [before] = listed(tmp_path)
    words = "--tpm 5000 --models * --expires never --tokens-per-day 1000 --alert-at 50 --queue-share 25 --share-cache"
    done = ctl(tmp_path, "keys", "set", "bob", *words.split())
    [after] = listed(tmp_path)

    assert done.stdout == "bob is changed\n"
    changed = {name: value for name, value in after.items() if before[name] != value}
    assert changed == {
        "tpm": 5000, "models": [], "expires": None, "tokens_per_day": 1000, "alert_at": 50, "queue_share": 25,
        "shares_cache": True,
    }  # fmt: skip
    assert ctl(tmp_path, "keys", "set", "bob", "--admin").returncode == 1
    assert "1000 tokens a day" in ctl(tmp_path, "keys", "list").stdout


def test_secrets_are_shown_by_nothing_later(tmp_path: Path) -> None:
    secret = created(tmp_path, "alice")
    table = ctl(tmp_path, "keys", "list").stdout
    stored = KeyFile(tmp_path / "keys" / "keys.json").read()[0]

    assert "alice" in table
    for text in (table, ctl(tmp_path, "keys", "list", "--json").stdout):
        assert secret not in text
        assert stored.hash not in text


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["create", "bad name"], 1, "cannot be used"),
        (["create", "x", "--admin", "--rpm", "1"], 1, "no limits"),
        (["create", "x", "--role", "metrics", "--models", "a"], 1, "no models"),
        (["create", "x", "--role", "metrics", "--admin"], 2, "not both"),
        (["create", "x", "--expires", "soon"], 2, "not a duration"),
        (["create", "x", "--expires", "0s"], 2, "last a while"),
        (["create", "x", "--expires", "99999999d"], 1, "after the year 5138"),
        (["create", "x", "y"], 2, "--models"),
        (["create", "x", "--rpm", "-1"], 2, "--rpm"),
        (["create", "x", "--models", ""], 1, "pattern is empty"),
        (["revoke", "nobody"], 1, "no key 'nobody'"),
        (["rotate", "nobody"], 1, "no key 'nobody'"),
        (["usage"], 3, "mlxd does not run"),
        (["set", "nobody", "--rpm", "1"], 1, "no key 'nobody'"),
        (["set", "nobody"], 2, "name what to change"),
        (["disable", "nobody"], 1, "no key 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_a_status(
    tmp_path: Path, words: list[str], status: int, expected: str
) -> None:
    done = ctl(tmp_path, "keys", *words)

    assert done.returncode == status
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert listed(tmp_path) == []


def test_a_key_that_a_version_before_let_expire_at_any_time_is_listed_and_changed(tmp_path: Path) -> None:
    created(tmp_path, "far", "--expires", "1d")
    path = tmp_path / "keys" / "keys.json"
    contents = json.loads(path.read_bytes())
    contents["keys"][0]["expires"] = 1e300
    path.write_text(json.dumps(contents))

    assert "never" in ctl(tmp_path, "keys", "list").stdout
    assert ctl(tmp_path, "keys", "set", "far", "--rpm", "5").returncode == 0
    assert listed(tmp_path)[0]["rpm"] == 5


def test_revoking_the_last_key_says_what_that_means(tmp_path: Path) -> None:
    created(tmp_path, "only")
    done = ctl(tmp_path, "keys", "revoke", "only")

    assert done.stdout == "only is revoked\n"
    assert "every request is refused" in done.stderr


def test_beyond_the_loopback_needs_a_key(tmp_path: Path) -> None:
    write_config(tmp_path, server='host = "0.0.0.0"')
    refused = ctl(tmp_path, "serve")
    assert refused.returncode == 78
    assert "mlxctl keys create" in refused.stderr

    secret = created(tmp_path, "lan")
    with DaemonProcess(tmp_path) as daemon:
        url = daemon.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        assert httpx2.get(f"{url}/v1/models", headers={"x-api-key": secret}).status_code == 200


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaemonProcess, None, None]:
    home = tmp_path_factory.mktemp("h")
    write_config(home)
    with DaemonProcess(home) as running:
        yield running


def test_keys_hold_at_once_in_a_daemon_that_runs(daemon: DaemonProcess) -> None:
    def status(secret: str | None) -> int:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        return daemon.client.get("/v1/models", headers=headers).status_code

    assert status(None) == 200
    alice = created(daemon.home, "alice")
    assert (status(None), status(alice)) == (401, 200)
    assert ctl(daemon.home, "keys", "disable", "alice").stdout == "alice is disabled\n"
    head, row = ctl(daemon.home, "keys", "list").stdout.splitlines()
    assert head.replace("AT ONCE", "AT_ONCE").split()[7:9] == ["STATE", "EXPIRES"]
    assert (status(alice), row.split()[7:9]) == (401, ["disabled", "never"])
    assert ctl(daemon.home, "keys", "enable", "alice").returncode == 0
    assert status(alice) == 200
    fresh = ctl(daemon.home, "keys", "rotate", "alice").stdout.strip()
    assert (status(alice), status(fresh)) == (401, 200)
    assert ctl(daemon.home, "keys", "revoke", "alice").returncode == 0
    assert status(fresh) == 401


def test_what_a_daemon_of_another_version_lacks_is_said_so(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXD_HOME", str(daemon.home))
    with pytest.raises(CommandFailed, match=r"does not know GET /v1/later.*another version.*restart"):
        client.get("/v1/later?by=key", DaemonStatus)


def test_a_time_without_use_is_said_so(daemon: DaemonProcess) -> None:
    found = ctl(daemon.home, "usage", "--from", "2001-01-01", "--to", "2001-01-02")
    assert found.stdout == "2001-01-01 to 2001-01-02\nNothing was used.\n"


def test_usage_and_chat_need_no_key(daemon: DaemonProcess) -> None:
    secret = created(daemon.home, "carol", "--rpm", "1")
    body = {"model": "a", "prompt": "hi", "max_tokens": 4}
    for expected in (200, 429):
        answer = daemon.client.post("/v1/completions", headers={"x-api-key": secret}, json=body)
        assert answer.status_code == expected
    usage = json.loads(ctl(daemon.home, "keys", "usage", "--json").stdout)
    [carol] = [key for key in usage["keys"] if key["name"] == "carol"]

    assert (carol["requests"], carol["prompt_tokens"], carol["completion_tokens"]) == (2, 3, 4)
    # Before the file of usage is written for the first time.
    [last] = [key["last_used"] for key in listed(daemon.home) if key["name"] == "carol"]
    assert last == carol["last_used"] > time.time() - 60
    assert carol["rejections"] == {"requests": 1}
    assert "requests 1" in ctl(daemon.home, "keys", "usage").stdout
    assert ctl(daemon.home, "chat", "a", "--max-tokens", "2", "hi").stdout == "t0 t1 \n"
    shown = ctl(daemon.home, "usage", "--by", "key,model", "--format", "csv").stdout.splitlines()
    assert shown[0] == "key,model,requests,prompt_tokens,cached_tokens,completion_tokens"
    assert "carol,a,1,3,0,4" in shown
    assert json.loads(ctl(daemon.home, "usage", "--format", "json").stdout)["by"] == ["key"]
    assert "(no key)" in ctl(daemon.home, "usage", "--by", "day,key").stdout
    for words in (["--by", "colour"], ["--from", "yesterday"]):
        assert ctl(daemon.home, "usage", *words).returncode != 0
