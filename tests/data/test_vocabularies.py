"""Vocabulary: ids in code-point order, lines cut as Python cuts them, round trips."""

import json

import numpy as np
import pytest

from mogrifier_jax import errors
from mogrifier_jax.data import vocabularies

BREAKS = "\n \r \v \f \x1c \x1d \x1e \x85 \u2028 \u2029 \r\n".split(" ")


def simulate(text, level):
    """Lines of tokens by Python's own splitlines, one at a time."""
    lines = []
    for line in text.splitlines(keepends=True):
        tokens = line.split() if level == "word" else list(line.removesuffix("\n"))
        lines.append([*tokens, vocabularies.EOS])
    return lines


def random_text(seed, size=2000):
    rng = np.random.default_rng(seed)
    pieces = [*BREAKS, *"abcdef     é日\U0001f600▼\x1f\t", "\n\n", "<UNK>"]
    return "".join(rng.choice(pieces, size))


def test_ids_are_in_code_point_order_with_eos_and_unknown_added():
    vocab = vocabularies.Vocabulary.from_text("b a <unk> Z é\n日 a\n", "word")
    assert vocab.tokens == ("<UNK>", "<unk>", "Z", "a", "b", "é", "▼", "日")
    assert (vocab.unknown_id, vocab.eos_id) == (0, 6)


@pytest.mark.parametrize("level", ["word", "character"])
@pytest.mark.parametrize("seed", range(4))
def test_encoding_equals_a_simulation_line_by_line(level, seed):
    text = random_text(seed)
    vocab = vocabularies.Vocabulary.from_text(text, level)
    lines = simulate(text, level)
    expected = [vocab.ids[token] for line in lines for token in line]
    starts = np.cumsum([0, *map(len, lines)])[:-1]
    split = vocab.encode_split(text)
    np.testing.assert_array_equal(split.tokens, expected)
    np.testing.assert_array_equal(split.line_starts, starts)
    only_newlines = [t for line in text.split("\n") for t in line]  # Control: other boundaries.
    assert len(split.tokens) > len(only_newlines) + text.count("\n") or level == "word"
    assert len(starts) > text.count("\n") + 1


def test_encoding_bytes_equals_encoding_their_cp437_characters():
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    text = data.decode("cp437")
    by_byte = vocabularies.Vocabulary.from_text(data, "byte")
    by_character = vocabularies.Vocabulary.from_text(text, "character")
    assert by_byte.tokens == by_character.tokens
    a, b = by_byte.encode_split(data), by_character.encode_split(text)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.line_starts, b.line_starts)
    assert b"\r" in data and b"\x85" in data
    latin = vocabularies.Vocabulary.from_text(data.decode("latin-1"), "character")
    assert latin.tokens != by_byte.tokens


def test_lines_span_blocks(monkeypatch):
    text = random_text(5)
    vocab = vocabularies.Vocabulary.from_text(text, "character")
    whole = vocab.encode_split(text)
    monkeypatch.setattr(vocabularies, "_BLOCK", 7)
    assert vocabularies.Vocabulary.from_text(text, "character") == vocab
    for a, b in zip(whole, vocab.encode_split(text), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("level", vocabularies.LEVELS)
def test_a_last_line_without_newline_gets_eos_and_no_text_gives_no_lines(level):
    vocab = vocabularies.Vocabulary.from_text("a b\n", level)
    eos = vocab.eos_id
    assert vocab.encode_split("a\nb").tokens.tolist() == [vocab.ids["a"], eos, vocab.ids["b"], eos]
    assert (
        vocab.encode_split("a\nb\n").tokens.tolist() == vocab.encode_split("a\nb").tokens.tolist()
    )
    assert vocab.encode_split("\n\n").tokens.tolist() == [eos, eos]
    empty = vocab.encode_split("")
    assert len(empty.tokens) == len(empty.line_starts) == 0


@pytest.mark.parametrize("level", vocabularies.LEVELS)
@pytest.mark.parametrize("text", ["", "ab c", "ab c\n", "\n", "a\n\nb", "ca b\nab"])
def test_decoding_inverts_encoding(level, text):
    vocab = vocabularies.Vocabulary.from_text("ab c ca b a\n", level)
    assert vocab.decode(vocab.encode(text)) == text
    assert vocab.encode(text).dtype == np.uint8


def test_a_prompt_is_not_closed_but_a_split_is():
    vocab = vocabularies.Vocabulary.from_text("ab", "character")
    assert vocab.encode("ab").tolist() == vocab.encode_split("ab").tokens.tolist()[:-1]
    assert vocab.encode("ab\n").tolist() == vocab.encode_split("ab").tokens.tolist()


def test_unseen_tokens_are_unknown_and_can_be_named():
    words = vocabularies.Vocabulary.from_text("a b", "word")
    assert words.encode("a x b y x").tolist() == words.encode("a <UNK> b <UNK> <UNK>").tolist()
    assert words.find_unknown("a x b y x\n") == ["x", "y"]
    characters = vocabularies.Vocabulary.from_text("ab", "character")
    assert characters.find_unknown("é a\nb é") == ["é", " "]
    assert characters.decode(characters.encode("aéb")) == "a\ufffdb"
    by_byte = vocabularies.Vocabulary.from_text("aé", "byte")
    assert by_byte.find_unknown("é aü\n") == ["0x20", "0xbc"]
    assert by_byte.decode(by_byte.encode("éa")) == "éa"


@pytest.mark.parametrize("level", vocabularies.LEVELS)
def test_a_saved_vocabulary_encodes_alike(level):
    vocab = vocabularies.Vocabulary.from_text(random_text(1), level)
    copy = vocabularies.Vocabulary.from_json(vocab.to_json())
    assert copy == vocab
    np.testing.assert_array_equal(copy.encode("abc é"), vocab.encode("abc é"))
    assert copy != vocabularies.Vocabulary.from_text("abc", level)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "no", json.dumps({"level": "word", "tokens": ["a"]})]
)
def test_json_that_is_no_vocabulary_is_refused(text):
    with pytest.raises(errors.UsageError, match="vocabulary"):
        vocabularies.Vocabulary.from_json(text)


def test_an_unknown_level_is_refused():
    with pytest.raises(errors.UsageError, match="word, character, byte"):
        vocabularies.Vocabulary.from_text("a", "sentence")


@pytest.mark.parametrize(
    ("num_types", "dtype"), [(254, "uint8"), (255, "uint16"), (65534, "uint16"), (65535, "int32")]
)
def test_ids_take_the_smallest_dtype(num_types, dtype):
    words = [f"w{i}" for i in range(num_types)]
    vocab = vocabularies.Vocabulary.from_tokens(words, "word")
    split = vocab.encode_split(" ".join(words))
    assert split.tokens.dtype == dtype
    assert sorted(split.tokens.tolist()) == sorted({*range(num_types + 2)} - {vocab.unknown_id})
