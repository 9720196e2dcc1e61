"""Agent libraries from PyPI: each calls a tool and tells what came of it, in one piece and streamed, over each API."""

from pathlib import Path

import pytest

from tests.clients.conftest import Workshop
from tests.clients.install import npm, pypi

pytestmark = pytest.mark.anyio

SCRIPTS = Path(__file__).parent / "scripts"
AGENTS = (
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "openai-agents==0.24.0",
    "langchain-openai==1.7.3",
    "langchain-anthropic==1.7.7",
    "langchain-ollama==1.1.0",
    "smolagents[openai]==1.26.0",
)
OLLAMA = ("ollama==0.6.1", "llm==0.36", "llm-ollama==0.19.1")
LITELLM = ("litellm==1.106.2", "mcp")


@pytest.mark.parametrize(
    ("library", "api"),
    [
        ("pydantic_ai", "chat"),
        ("pydantic_ai", "responses"),
        ("pydantic_ai", "anthropic"),
        ("openai_agents", "chat"),
        ("openai_agents", "responses"),
        ("langchain", "chat"),
        ("langchain", "responses"),
        ("langchain", "anthropic"),
        ("langchain", "ollama"),
        ("smolagents", "chat"),
        ("litellm", "openai"),
        ("litellm", "anthropic"),
        ("litellm", "ollama_chat"),
    ],
)
async def test_a_library(workshop: Workshop, library: str, api: str) -> None:
    commands = pypi("litellm", *LITELLM) if library == "litellm" else pypi("pyagents", *AGENTS)
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    said = await workshop.run([commands / "python", SCRIPTS / f"with_{library}.py", workshop.url, api], env)

    plain, _, streamed = said.partition("streamed")
    assert workshop.secret in plain, said
    assert workshop.secret in streamed, said


async def test_ollamas_python_package(workshop: Workshop) -> None:
    python = pypi("ollama", *OLLAMA) / "python"
    said = await workshop.run([python, SCRIPTS / "with_ollama.py", workshop.url])

    plain, _, streamed = said.partition("streamed")
    assert workshop.secret in plain, said
    assert workshop.secret in streamed, said


async def test_ollamas_javascript_package(workshop: Workshop) -> None:
    packages = npm("ollama-js", "ollama@0.6.4").parent
    said = await workshop.run(["node", SCRIPTS / "with_ollama.mjs", packages, workshop.url])

    plain, _, streamed = said.partition("streamed")
    assert workshop.secret in plain, said
    assert workshop.secret in streamed, said


async def test_llm_with_its_plugin_for_ollama(workshop: Workshop) -> None:
    llm = pypi("ollama", *OLLAMA) / "llm"
    env = {"LLM_USER_PATH": str(workshop.home), "OLLAMA_HOST": workshop.url}
    said = await workshop.run([llm, "-m", "ollama/m", "-T", "llm_version", "Which version is this?"], env)
    assert "It says: 0.36" in said
