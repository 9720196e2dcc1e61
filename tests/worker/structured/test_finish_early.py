"""The shortest way to the end of a grammar, and models that have fewer tokens than their tokenizer."""

from protocol.to_worker import Constraint, ConstraintKind
from tests.support.models import tiny_tokenizer
from worker.output.detokenize import Vocabulary
from worker.structured.grammar_compiler import Grammars
from worker.structured.row_constraint import EarlyFinish, Guide, Rules


def test_a_model_that_lacks_tokens_of_its_tokenizer_is_never_led_to_them() -> None:
    tokenizer = tiny_tokenizer(["</function>"])
    vocabulary = tokenizer.get_vocab()
    vocab_size, eos_id = vocabulary["</function>"], vocabulary["<|im_end|>"]
    grammars = Grammars(tokenizer, vocab_size, [eos_id])
    markup = f'start: /[a-z]*/ (<[{vocab_size}]> | "!")'
    grammar = grammars.compile(Constraint(ConstraintKind.GRAMMAR, markup))

    for ends, first in ((("</function>",), None), (("</function>", "!"), "!")):
        finish = EarlyFinish(grammars.table().tokenize_str, vocab_size, [eos_id], (), ends)
        walk = grammar.walk()

        assert tuple(finish.way(walk, walk.allowed())) == (() if first is None else (vocabulary[first],))


def test_reasoning_that_a_model_cannot_begin_is_not_allowed_before_its_answer() -> None:
    tokenizer = tiny_tokenizer(["<seed:think>", "</seed:think>"])
    tokenizer.chat_template = "<seed:think>"
    vocabulary = tokenizer.get_vocab()
    vocab_size, eos_id = vocabulary["<seed:think>"], vocabulary["<|im_end|>"]
    rules = Rules(tokenizer, "seed_oss", vocab_size, [eos_id], Vocabulary(tokenizer).token_bytes)
    constraint = Constraint(ConstraintKind.CHOICE, '["yes"]', after_reasoning=True)

    allowed = Guide(rules.make(constraint, "")).allowed()

    assert allowed is not None
    assert allowed.any()
    assert not allowed[eos_id]
