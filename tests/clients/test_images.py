"""Agents and libraries that show a picture: its bytes reach the model as they are in the file."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.clients.conftest import PICTURE, Workshop
from tests.clients.install import npm, pypi
from tests.clients.test_libraries import AGENTS, SCRIPTS

pytestmark = pytest.mark.anyio


def seen(folder: Path) -> str:
    """Words of the model about the picture in a folder."""
    digest = hashlib.blake2b((folder / PICTURE).read_bytes(), digest_size=32).hexdigest()
    return f"I see image:{digest}"


async def test_claude_code_reads_an_image_by_its_tool(gallery: Workshop) -> None:
    claude = npm("claude", "@anthropic-ai/claude-code") / "claude"
    env = {
        "ANTHROPIC_BASE_URL": gallery.url,
        "ANTHROPIC_API_KEY": "x",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    task = f"What is in [[{gallery.folder / PICTURE}]]?"
    said = await gallery.run([claude, "-p", task, "--output-format", "json", "--allowedTools", "Read"], env)

    answer = json.loads(said.splitlines()[-1])
    assert answer["is_error"] is False
    # It may write the file anew, smaller: then its digest is another one.
    assert "I see image:" in answer["result"]


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
async def test_langchain_shows_an_image(gallery: Workshop, api: str) -> None:
    python = pypi("pyagents", *AGENTS) / "python"
    said = await gallery.run([python, SCRIPTS / "image_with_langchain.py", gallery.url, api, PICTURE])

    assert said.count(seen(gallery.folder)) == 2, said


async def test_llm_attaches_an_image(gallery: Workshop) -> None:
    llm = pypi("llm", "llm==0.36") / "llm"
    home = gallery.home / "llm"
    home.mkdir()
    model = f"- model_id: mlxd\n  model_name: m\n  api_base: {gallery.url}/v1\n  vision: true\n"
    (home / "extra-openai-models.yaml").write_text(model)
    command = [llm, "-m", "mlxd", "--key", "x", "-a", PICTURE, "What is this?"]
    said = await gallery.run(command, {"LLM_USER_PATH": str(home)})

    assert seen(gallery.folder) in said
