"""Verdicts on outputs in the form of macOS's commands, good and bad."""

import json

import pytest

from gateway.ctl.selftest.steps import BOTH, STEPS, SelftestStep
from gateway.ctl.selftest.verdicts import EvidenceText, StepEvidence, StepVerdict

GIB = 1 << 30
UUID = "6B29FC40-CA47-1067-B31D-00DD010662DA\n"
LISTED = "gui/501/dev.mlxd.selftest = {{\n\tstate = running\n\tpid = {}\n\tlast exit code = (never exited)\n}}"
GONE = 'Bad request.\nCould not find service "dev.mlxd.selftest" in domain for user gui: 501'
WIRED = 'mlxd_worker_memory_bytes{kind="wired_limit",model="demo"} '
ASSERTED = (
    "pid 812(caffeinate): [0x0000a2c700018f3d] 00:00:02 PreventUserIdleSystemSleep "
    'named: "caffeinate command-line tool"'
)
DIED = "worker demo#3 ended: the worker of model 'demo' died (SIGKILL: killed, most often for memory)"
AUDIT = {"time": "2026-11-27T07:18:59.255+00:00", "action": "model.load", "target": "demo", "uid": 501, "pid": 77}
EQUAL = [
    '{"name":"alone","requests":8}',
    '{"name":"batched","requests":8}',
    '{"name":"images","is_skipped":true,"note":"-"}',
]
CHANGED = '{"name":"batched","requests":8,"differences":[{"request":1,"position":4}]}'
NO_ROOM = (
    "exit status 1: mlxctl: the model is loaded once more for this: its weights take 90.0 GiB, and 3.0 GiB are free."
)
PROFILE = '{"machine":"applegpu_g16s, Apple M4 Max, 40 GPU cores, macOS 26B101, 65536 MiB"}'

# Evidence with which each step passes.
GOOD: dict[str, dict[str, object]] = {
    "socket-paths": {
        "longest": "88 characters: mlxd 0.1.0 answers",
        "too long": "89 characters, exit status 73: /tmp/h is longer than 103 bytes; set MLXD_HOME to a shorter folder",
    },
    "footprint": {
        "footprint": "python3.13 [812]: 64-bit    Footprint: 118292480 B (16384 bytes per page)",
        "gateway": 118292480,
        "worker": "1.171e+08",
    },
    "overhead": {"footprint": 118292480, "weights": 48365568},
    "memory-budget": {"iogpu.wired_limit_mb": "0\n", "hw.memsize": f"{64 * GIB}\n", "budget": 48 * GIB},
    "wired-limit": {
        "iogpu.wired_limit_mb": "49152\n",
        "hw.memsize": 64 * GIB,
        "metrics": f"{WIRED}1.0e+09",
        "log": "wired limit: 1000000000 bytes instead of 0",
    },
    "doctor": {"iogpu.wired_limit_mb": "0\n", "pmset": " sleep                1 (sleep prevented by powerd)"},
    "boot-id": {"boot id": UUID, "again": UUID},
    "peer": {"caller": '{"uid": 501, "pid": 77}', "mlxctl logs --audit": json.dumps(AUDIT)},
    "page": {
        "page": "200 text/html; charset=utf-8, 3337 bytes",
        "open": "exit status 0 ",
        "audit": '{"action":"ui.login"}',
    },
    "desktop": {
        "IOHIDSystem": '      "HIDIdleTime" = 2403058417',
        "IODisplayWrangler": "",
        "pmset -g batt": "Now drawing from 'AC Power'",
        "pmset -g therm": "Note: No thermal warning level has been recorded",
    },
    "awake": {
        "caffeinate after linger": "812",
        "held after linger": f"   {ASSERTED}",
        "released after linger": "no line of it",
        "caffeinate after kill": "812",
        "held after kill": f"   {ASSERTED}",
        "released after kill": "no line of it",
    },
    "exit-watch": {
        "killed at": 1795763939.612,
        "log": json.dumps({"time": "2026-11-27T07:18:59.677+00:00", "message": DIED}),
    },
    "sigterm": {"seconds": "0.21"},
    "adoption": {
        "worker before": 812,
        "worker after": 812,
        "state before": '{"pid": 812, "start_ticks": 614149}',
        "state after": '{"pid": 812, "start_ticks": 614149}',
    },
    "disk-cache": {"answer before": " ships", "answer after": " ships", "cached before": 0, "cached after": 1680},
    "memory-returned": {"ratio": "1.0"},
    "quantized-kv": {"log": "demo#2: KV is kept in 8 bits, in groups of 64", "answer": " once"},
    "timing-profile": {
        "profile": PROFILE,
        "machdep.cpu.brand_string": "Apple M4 Max\n",
        "kern.osversion": "26B101\n",
        "log": "",
    },
    "watchdog": {"prompt tokens": 29000, "log": ""},
    "launchd": {
        "print": LISTED.format(812),
        "ps": "/Users/me/env/bin/python3 -P -m gateway.main --launchd",
        "print after kill": LISTED.format(813),
        "print after restart": LISTED.format(814),
        "workers": "901 901 901",
        "print after uninstall": GONE,
        "left": "nothing",
    },
    "ranks": {"ranks": "812 813", "alone": '[" a"]', "together": '[" a"]', "ended after": "7.5 s"},
    "tokens:demo": {"mlxctl verify demo --json": "\n".join(EQUAL)},
}
# Changes of one observation with which a step fails, and what its verdict must say.
BAD: list[tuple[str, str, object, str]] = [
    ("socket-paths", "longest", "88 characters, exit status 73: cannot listen", "cannot listen"),
    ("socket-paths", "too long", "89 characters: mlxd 0.1.0 answers", "answers"),
    ("socket-paths", "too long", "exit status 73: AF_UNIX path too long", "AF_UNIX"),
    ("footprint", "gateway", 0, "the gateway: 0.0 MiB"),
    ("footprint", "worker", "2.4e+08", "the worker"),
    ("footprint", "footprint", "exit status 1: footprint: unable to access process", "0.0 MiB"),
    ("overhead", "footprint", 318292480, "257 MiB"),
    ("overhead", "footprint", 0, "sizes"),
    ("memory-budget", "budget", 8 * GIB, "8.00 GiB"),
    ("memory-budget", "budget", "none", "GiB"),
    ("memory-budget", "iogpu.wired_limit_mb", "24576\n", "24.00"),
    ("wired-limit", "metrics", f"{WIRED}0.0", "0.00 GiB"),
    ("wired-limit", "metrics", f"{WIRED}6e+10", "48.00 GiB"),
    ("wired-limit", "log", "", "log"),
    ("doctor", "pmset", "exit status 1: pmset: not found", "pmset"),
    ("doctor", "iogpu.wired_limit_mb", "exit status 1: unknown oid", "sysctl"),
    ("boot-id", "boot id", "", "UUID"),
    ("boot-id", "again", "00000000-CA47-1067-B31D-00DD010662DA\n", "twice"),
    ("peer", "mlxctl logs --audit", json.dumps(AUDIT | {"uid": None}), "uid None"),
    ("peer", "mlxctl logs --audit", json.dumps(AUDIT | {"pid": 0}), "pid 0"),
    ("peer", "mlxctl logs --audit", "exit status 1: no log", "audit log"),
    ("page", "page", "404 application/json, 80 bytes", "404"),
    ("page", "open", "exit status 1 LSOpenURLsWithRole() failed", "failed"),
    ("page", "audit", "", "nobody"),
    ("desktop", "IOHIDSystem", "", "HIDIdleTime"),
    ("desktop", "pmset -g batt", "", "source of power"),
    ("desktop", "pmset -g therm", "exit status 64: Usage: pmset", "Usage"),
    ("awake", "held after linger", "no line of it", "caffeinate 812"),
    ("awake", "caffeinate after kill", "none", "caffeinate none"),
    ("awake", "released after linger", ASSERTED, "not released after linger"),
    ("awake", "released after kill", ASSERTED, "not released after kill"),
    ("exit-watch", "killed at", 1795763936.0, "3677 ms"),
    ("exit-watch", "log", "", "no end"),
    ("sigterm", "seconds", "12.40", "12.40 s"),
    ("sigterm", "seconds", "it still runs", "still runs"),
    ("adoption", "worker after", 999, "999"),
    ("adoption", "state after", '{"pid": 812, "start_ticks": 5}', "start"),
    ("adoption", "state before", '{"pid": 812, "start_ticks": 0}', "start"),
    ("disk-cache", "cached after", 0, "0 prompt tokens"),
    ("disk-cache", "answer after", " boats", "another answer"),
    ("memory-returned", "ratio", "0.4", "0.400"),
    ("memory-returned", "ratio", "none", "not known"),
    (
        "quantized-kv",
        "log",
        "KV is kept in 8 bits\nKV in 8 bits is dequantized for each step: no kernel",
        "is dequantized",
    ),
    ("quantized-kv", "log", "", "8 bits"),
    ("timing-profile", "profile", PROFILE.replace("40 GPU cores", "? GPU cores"), "GPU's cores"),
    ("timing-profile", "kern.osversion", "26B102\n", "26B102"),
    ("timing-profile", "profile", "none", "Apple M4 Max"),
    ("timing-profile", "log", "demo.json is not used: it is damaged", "damaged"),
    ("watchdog", "log", "kIOGPUCommandBufferCallbackErrorImpactingInteractivity", "ImpactingInteractivity"),
    ("watchdog", "prompt tokens", 100, "100 tokens"),
    ("launchd", "print", GONE, "not loaded"),
    ("launchd", "ps", "/Users/me/agent/current/python -m other", "other"),
    ("launchd", "print after kill", LISTED.format(812), "812, 812"),
    ("launchd", "workers", "901 902 902", "901 902"),
    ("launchd", "print after uninstall", LISTED.format(814), "still knows"),
    ("launchd", "left", "dev.mlxd.selftest.plist", "plist"),
    ("ranks", "together", '[" b"]', "other tokens"),
    ("ranks", "ended after", "it still runs", "still runs"),
    ("ranks", "ended after", "25.0 s", "25.0 s"),
    ("ranks", "ranks", "", "ranks none"),
    ("tokens:demo", "mlxctl verify demo --json", CHANGED, "batched"),
    ("tokens:demo", "mlxctl verify demo --json", "exit status 1: mlxctl: no such model", "no such model"),
    ("tokens:demo", "mlxctl verify demo --json", "", "nothing"),
]
BY_NAME: dict[str, SelftestStep] = {step.name: step for step in STEPS}


def verdict(name: str, **changes: object) -> StepVerdict:
    """The verdict of a step on its good evidence with changes."""
    texts = GOOD[name] | changes
    return BY_NAME[name].judge(StepEvidence(tuple(EvidenceText(key, str(text)) for key, text in texts.items())))


def test_every_step_has_evidence_that_passes_and_some_that_fails() -> None:
    assert set(GOOD) == set(BY_NAME) == {name for name, *_ in BAD}


@pytest.mark.parametrize("name", GOOD)
def test_good_evidence_passes(name: str) -> None:
    assert verdict(name).outcome == "passed", verdict(name).text


@pytest.mark.parametrize(("name", "key", "text", "reason"), BAD)
def test_bad_evidence_fails_with_what_is_wrong(name: str, key: str, text: object, reason: str) -> None:
    found = verdict(name, **{key: text})

    assert found.outcome == "failed"
    assert reason in found.text


@pytest.mark.parametrize("name", BY_NAME)
def test_no_evidence_is_no_success(name: str) -> None:
    assert BY_NAME[name].judge(StepEvidence()).outcome == "failed"


def test_a_model_that_has_no_room_is_skipped() -> None:
    found = verdict("tokens:demo", **{"mlxctl verify demo --json": NO_ROOM})

    assert found.outcome == "skipped"
    assert "90.0 GiB" in found.text


def test_on_linux_the_footprint_is_compared_with_the_anonymous_pages() -> None:
    rollup = "Rss: 150000 kB\nPrivate_Clean: 19220 kB\nAnonymous: 115520 kB\n"

    assert verdict("footprint", footprint="", smaps_rollup=rollup).outcome == "passed"
    assert verdict("footprint", footprint="", smaps_rollup=rollup.replace("115520", "314000")).outcome == "failed"


def test_steps_of_linux_are_those_that_need_no_tool_of_macos() -> None:
    assert {step.name for step in STEPS if step.platforms == BOTH} >= {
        "footprint",
        "disk-cache",
        "ranks",
        "tokens:demo",
    }
