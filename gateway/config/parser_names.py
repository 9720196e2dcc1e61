"""Names of the worker's parsers. With them, a wrong name is reported before a worker starts."""

import difflib
from typing import Final

# The gateway must not import `worker.output.parsers`, which has the same names; a test compares them.
PARSERS: Final = frozenset({
    "apertus", "apriel", "apriel1.6", "apriel16", "bielik", "cohere", "command_a", "command_r", "command_r7b",
    "command_r_plus", "deepseek_r1", "deepseek_v3", "deepseek_v3.1", "deepseek_v3.2", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "dots", "dots1", "dots3", "dots3_note", "dots_llm1", "ernie", "ernie45",
    "exaone", "firefunction", "firefunction_v2", "function_gemma", "functionary", "functionary_v31",
    "functionary_v32", "functiongemma", "gemma", "gemma4", "gigachat", "gigachat3", "glm", "glm45", "glm46",
    "glm47", "gpt-oss", "gpt_oss", "granite", "granite3", "granite4", "granite_20b_fc", "granite_thinking",
    "harmony", "hermes", "holo2", "hunyuan", "hunyuan_a13b", "hunyuan_v3", "hy_v3", "internlm", "internlm2",
    "internlm3", "jamba", "json_tools", "kimi", "kimi_k2", "kimi_k3", "laguna", "lfm2", "lfm2_pythonic", "ling",
    "ling3", "llama", "llama3", "llama3_json", "llama4", "llama4_json", "llama4_pythonic", "longcat",
    "magistral", "mimo", "minicpm", "minicpm5", "minimax", "minimax_m1", "minimax_m2", "minimax_m3", "mistral",
    "mistral_v3", "muse", "muse_spark", "nemotron", "nemotron_json", "nemotron_v2", "nemotron_v3", "none",
    "olmo3", "olmo3_pythonic", "phi4", "phi4mini", "pythonic", "qwen", "qwen2.5", "qwen25", "qwen3", "qwen3.5",
    "qwen3_5", "qwen3_coder", "qwen3_think", "qwen3_xml", "qwen3xml", "qwq", "reka", "seed", "seed_oss",
    "smollm3", "solar", "solar_open", "spark", "step", "step3", "step3.5", "step3p5", "think", "xlam",
})  # fmt: skip


def bad_parser(name: str) -> str | None:
    """Return what is wrong with a parser's name; None if it is valid. An empty name selects the model's own parser."""
    plain = name.strip().lower().replace("-", "_")
    if not plain or plain in PARSERS or plain.replace(".", "_") in PARSERS:
        return None
    near = difflib.get_close_matches(plain, PARSERS, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(PARSERS))}"
    return f"unknown parser {name!r}; {hint}"
