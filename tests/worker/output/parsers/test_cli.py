"""The parse command prints the events of a file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scale import patient
from worker.output.parsers.cli import main

RAW = 'plan</think>Yes.<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'


def lines(out: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def raw(tmp_path: Path) -> str:
    path = tmp_path / "raw.txt"
    path.write_text(RAW)
    return str(path)


def test_events_are_json_lines(raw: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parser", "hermes", "--start-in-reasoning", raw]) == 0
    events = lines(capsys.readouterr().out)
    assert [event["type"] for event in events] == [
        "reasoning", "content", "tool_begin", "tool_args", "tool_end", "finish",
    ]  # fmt: skip
    assert events[0]["text"] == "plan"
    assert events[2]["name"] == "f"
    assert events[3]["text"] == '{"n": 1}'
    assert events[2]["id"] == events[3]["id"] == events[4]["id"]


@pytest.mark.parametrize("split", ["1", "7", "random"])
def test_a_split_prints_the_same_text(raw: str, split: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--parser", "hermes", "--start-in-reasoning", "--split", split, raw])
    events = lines(capsys.readouterr().out)
    assert "".join(event["text"] for event in events if event["type"] == "reasoning") == "plan"
    assert "".join(event["text"] for event in events if event["type"] == "tool_args") == '{"n": 1}'


def test_a_template_tells_whether_reasoning_is_open(
    raw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    main(["--parser", "hermes", "--template", str(template), raw])
    assert lines(capsys.readouterr().out)[0] == {"type": "reasoning", "text": "plan"}


def test_tools_give_the_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, tools = tmp_path / "raw.txt", tmp_path / "tools.json"
    raw.write_text("<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n</function>\n</tool_call>")
    schema = {"type": "object", "properties": {"s": {"type": "string"}}}
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    main(["--parser", "qwen3_coder", "--tools", str(tools), str(raw)])
    events = lines(capsys.readouterr().out)
    assert "".join(event["text"] for event in events if event["type"] == "tool_args") == '{"s": "1"}'


def test_a_call_that_cannot_be_read_does_not_finish_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = tmp_path / "raw.txt"
    raw.write_text('<tool_call>{"name": "f", "arguments": {"s": "ha')
    main(["--parser", "hermes", str(raw)])
    assert lines(capsys.readouterr().out)[-1] == {"type": "finish", "text": "length", "malformed": 1}


@pytest.mark.parametrize("argv", [["--parser", "unheard-of"], ["--parser", "hermes", "/no/such/file"]])
def test_a_mistake_is_told_and_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "parse:" in capsys.readouterr().err


def test_the_command_needs_no_mlx() -> None:
    code = "import sys; sys.argv = ['']; import worker.output.parsers.cli; sys.exit('mlx' in str(sorted(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=patient(60)).returncode == 0
