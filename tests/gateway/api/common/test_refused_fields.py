"""Fields of known dialects that restrict or change an answer: held, or refused by name; never dropped."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.anthropic.request import decode_messages
from gateway.api.common.request_fields import REFUSED_FIELDS, SAMPLER_FIELDS, FieldTable, constraint_fields
from gateway.api.ollama.request import decode_chat as decode_ollama_chat
from gateway.api.ollama.request import decode_generate
from gateway.api.openai.embeddings import decode_embeddings
from gateway.api.openai.request import decode_chat, decode_completion
from gateway.api.responses.request import decode_responses
from gateway.errors import BadRequest, Unsupported

Decode = Callable[[bytes], tuple[Any, list[str]]]
MESSAGES = [{"role": "user", "content": "x"}]
CONSTRAINTS = constraint_fields("f", "l")
# Each dialect: its decoder, the least body, and the table of what it lacks.
DIALECTS: dict[str, tuple[Decode, dict[str, Any], FieldTable]] = {
    "chat": (decode_chat, {"messages": MESSAGES}, REFUSED_FIELDS),
    "completions": (decode_completion, {"prompt": "x"}, REFUSED_FIELDS),
    "responses": (decode_responses, {"input": "x"}, REFUSED_FIELDS | SAMPLER_FIELDS | CONSTRAINTS),
    "messages": (
        decode_messages,
        {"messages": MESSAGES, "max_tokens": 5},
        REFUSED_FIELDS | SAMPLER_FIELDS | CONSTRAINTS,
    ),
    "ollama chat": (decode_ollama_chat, {"messages": MESSAGES}, REFUSED_FIELDS | CONSTRAINTS),
    "ollama generate": (decode_generate, {"prompt": "x"}, REFUSED_FIELDS | CONSTRAINTS),
}
# The fields of each server's requests that restrict or change what is generated, beside OpenAI's.
KNOWN = {
    "llama.cpp": (
        "n_predict n_indent n_cmpl t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability "
        "xtc_threshold typical_p temperature dynatemp_range repeat_last_n repeat_penalty frequency_penalty "
        "presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat "
        "adaptive_target seed n_probs min_keep post_sampling_probs lora json_schema grammar grammar_lazy "
        "grammar_triggers samplers logit_bias ignore_eos stop return_tokens reasoning_budget thinking_budget_tokens"
    ),
    "vLLM": (
        "guided_json guided_regex guided_grammar guided_choice guided_whitespace_pattern structured_outputs "
        "use_beam_search length_penalty stop_token_ids include_stop_str_in_output min_tokens skip_special_tokens "
        "truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo "
        "add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs "
        "mm_processor_kwargs media_io_kwargs return_tokens_as_token_ids return_token_ids thinking_token_budget "
        "repetition_penalty logits_processors vllm_xargs prompt_embeds repetition_detection watermarking best_of"
    ),
    "SGLang": "regex ebnf structural_tag stop_regex no_stop_trim lora_path custom_logit_processor input_ids",
    "TGI": "tool_prompt guideline watermark do_sample",
    "mlx": (
        "adapters role_mapping repetition_context_size presence_context_size frequency_context_size adapter_path "
        "resize_shape p_less min_pixels max_pixels enable_thinking thinking_budget"
    ),
    "text-generation-webui": (
        "tfs top_a epsilon_cutoff eta_cutoff smoothing_factor no_repeat_ngram_size encoder_repetition_penalty "
        "penalty_alpha guidance_scale negative_prompt num_beams custom_token_bans grammar_string sampler_priority "
        "dynamic_temperature mirostat_mode ban_eos_token skew typical"
    ),
    "OpenAI": "prompt_cache_options moderation response_format modalities audio web_search_options prediction",
}


def body(dialect: str, **fields: Any) -> bytes:
    return json.dumps(DIALECTS[dialect][1] | fields).encode()


def served(dialect: str) -> set[str]:
    return set(DIALECTS[dialect][0](body(dialect))[0].__struct_fields__)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_not_served_is_refused_by_its_name_and_neutral_values_are_taken(dialect: str) -> None:
    decode, _, table = DIALECTS[dialect]
    lacking = table.keys() - served(dialect)
    assert len(lacking) > 50
    for name in lacking:
        entry = table[name]
        param = f"{name}.{entry.member}" if entry.member else name
        with pytest.raises(Unsupported, match=f"'{param}' is not supported") as refused:
            decode(body(dialect, **{name: {entry.member: "x"} if entry.member else "x"}))
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
        for value in (None, "", [], {}, *entry.neutral):
            assert decode(body(dialect, **{name: {entry.member: value} if entry.member else value}))[1] == []


@pytest.mark.parametrize("server", KNOWN)
def test_each_field_of_other_servers_that_changes_an_answer_is_served_or_refused(server: str) -> None:
    for name in KNOWN[server].split():
        for dialect in ("chat", "completions"):
            if name not in served(dialect):
                try:
                    _, unknown = DIALECTS[dialect][0](body(dialect, **{name: {"prewarm": "x"}}))
                except BadRequest:
                    continue
                # Of chats alone.
                assert name in served("chat"), name
                assert unknown == [name]


def test_hints_of_other_servers_are_named_and_nothing_else() -> None:
    hints = {"cache_prompt": True, "id_slot": 1, "timings_per_token": True, "request_id": "x", "mirostat_tau": 5}

    assert set(decode_chat(body("chat", user="u", metadata={}, store=True, **hints))[1]) == set(hints)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"grammar": 'root ::= "a"'}}, "options.grammar"),
        ({"options": {"dry_multiplier": 0.8}}, "options.dry_multiplier"),
    ],
)
def test_ollamas_options_are_refused_where_they_are(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as refused:
        decode_ollama_chat(body("ollama chat", **fields))
    assert refused.value.param == param


def test_ollamas_clients_may_send_what_their_options_have_by_default() -> None:
    options = {"mirostat": 0, "tfs_z": 1.0, "mirostat_tau": 5.0, "num_ctx": 8192}

    assert decode_ollama_chat(body("ollama chat", options=options))[1] == ["options.num_ctx"]


@pytest.mark.parametrize("name", ["mcp_servers", "container", "compaction", "thread"])
def test_what_anthropics_servers_would_do_is_refused(name: str) -> None:
    assert decode_messages(body("messages", **{name: None}))[1] == []
    with pytest.raises(Unsupported) as refused:
        decode_messages(body("messages", **{name: [{"type": "x"}]}))
    assert refused.value.param == name


def test_a_large_body_is_refused_as_a_small_one_is() -> None:
    messages = [{"role": "user", "content": "x" * 1000} for _ in range(300)]
    with pytest.raises(Unsupported) as refused:
        decode_chat(body("chat", messages=messages, samplers=["top_k"]))
    assert refused.value.param == "samplers"
    assert decode_chat(body("chat", messages=messages, samplers=[]))[1] == []


@pytest.mark.parametrize("fields", [{"normalize": False}, {"embd_normalize": 0}, {"embed_dtype": "int8"}])
def test_other_vectors_than_the_models_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        decode_embeddings(json.dumps({"input": "x", **fields}).encode())
    assert decode_embeddings(b'{"input": "x", "normalize": true, "embd_normalize": 2}')[1] == []
