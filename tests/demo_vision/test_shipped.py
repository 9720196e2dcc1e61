"""The shipped weights of demo-vision, as far as mlx-lm reads them."""

from mlx_lm import generate, load

from tests.demo_vision.conftest import REPOSITORY

SHIPPED = REPOSITORY / "worker" / "demo_vision"


def test_the_package_data_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in SHIPPED.iterdir() if path.is_file()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    } <= set(sizes)
    assert sum(sizes.values()) < 25e6


def test_mlx_lm_alone_answers_text() -> None:
    model, wrapped = load(str(SHIPPED))[:2]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = wrapped.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)
    assert generate(model, wrapped, prompt, max_tokens=40) == "Paris."
