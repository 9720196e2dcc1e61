"""Keys of media in prompts."""

import numpy as np

from worker.vision.media import Medium, Span, before_media, digest_words, media_keys


def medium(content: int) -> Medium:
    return Medium("image", bytes([content]) * 32, 16, dict)


def test_words_of_a_digest_are_ids_that_no_vocabulary_has() -> None:
    words = digest_words(bytes(range(16)) + b"\xff" * 16)
    assert words.dtype == np.int32
    assert len(words) == 8
    assert all(word < 0 for word in words.tolist())
    assert len(set(words[:4].tolist())) == 4


def test_keys_tell_media_from_each_other_and_leave_text() -> None:
    tokens = np.array([5, 9, 9, 9, 9, 6], dtype=np.int32)
    one, other = (media_keys(tokens, [Span(1, 5, medium(content))]) for content in (1, 2))
    assert one[[0, 5]].tolist() == other[[0, 5]].tolist() == [5, 6]
    assert not np.any(one[1:5] == other[1:5])
    assert tokens.tolist() == [5, 9, 9, 9, 9, 6]


def test_keys_of_a_medium_in_several_spans_count_on() -> None:
    image = Medium("image", bytes(range(32)), 6, dict)
    tokens = np.array([9, 9, 9, 5, 9, 9, 9], dtype=np.int32)
    keys = media_keys(tokens, [Span(0, 3, image), Span(4, 7, image, 3)])
    assert keys[[0, 1, 2, 4, 5, 6]].tolist() == image.words[:6].tolist()


def test_tokens_that_end_inside_a_span_have_the_keys_of_its_beginning() -> None:
    spans = [Span(2, 8, medium(3))]
    whole = media_keys(np.full(10, 9, dtype=np.int32), spans)
    assert media_keys(np.full(5, 9, dtype=np.int32), spans).tolist() == whole[:5].tolist()
    assert media_keys(np.full(2, 9, dtype=np.int32), spans).tolist() == [9, 9]


def test_a_cut_inside_a_span_moves_to_its_beginning() -> None:
    spans = [Span(2, 5, medium(1)), Span(5, 8, medium(2))]
    assert [before_media(spans, at) for at in range(10)] == [0, 1, 2, 2, 2, 5, 5, 5, 8, 9]
