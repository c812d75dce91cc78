import json
import sys

import pytest

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.text.encode import encode
from gradaccum.recipes.text.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n" for i in range(50)]
ANY_TEXT = [
    "plain",
    "  leading, trailing  ",
    "tabs\t\tand\r\nlines\n\n",
    "é ü ß 漢字 🙂 \u200d",
    "e\u0301 is not \u00e9",
    "\x00\x01\x7f",
    "spelled out: <eos> <pad><mask> .",
    "a , b . c ! it 's n't",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


def test_special_tokens_are_set_and_distinct(tokenizer):
    assert tokenizer.pad_token == "<pad>"
    assert tokenizer.mask_token == "<mask>"
    assert tokenizer.eos_token == tokenizer.bos_token == "<eos>"
    ids = {tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.eos_token_id}
    assert len(ids) == 3
    assert max(ids) < len(tokenizer) <= 300


@pytest.mark.parametrize("text", ANY_TEXT)
def test_any_text_comes_back(tokenizer, text):
    (sample,) = encode(tokenizer, [text], max_length=1_000)
    assert tokenizer.decode(sample[:-1]) == text


def test_a_token_spelled_out_in_a_text_is_no_special_token(tokenizer):
    (sample,) = encode(tokenizer, ["<eos><pad><mask>"], max_length=100)
    special = {tokenizer.pad_token_id, tokenizer.mask_token_id, tokenizer.eos_token_id}
    assert special.isdisjoint(sample[:-1])
    assert sample[-1] == tokenizer.eos_token_id


def test_training_learns_and_is_deterministic(tokenizer):
    again = train_tokenizer(TEXTS, vocab_size=300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    (sample,) = encode(tokenizer, ["    return x + "], max_length=100)
    assert len(sample) < 8  # of 15 characters


def test_large_texts_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr("gradaccum.recipes.text.tokenizer._MAX_TRAINING_CHARACTERS", 100)
    texts = ["aaaa bbbb", "xxxx yyyy"] * 20  # 360 characters: every fourth text is used
    tokens = train_tokenizer(texts, vocab_size=300).get_vocab()
    assert "aaaa" in tokens
    assert "xxxx" not in tokens


@pytest.mark.parametrize("vocab_size", [258, 0])
def test_a_vocabulary_below_the_bytes_is_an_error(vocab_size):
    with pytest.raises(ArgumentError) as caught:
        train_tokenizer(TEXTS, vocab_size=vocab_size)
    assert str(caught.value) == (
        f"train_tokenizer(vocab_size={vocab_size}): expected 259 or more (256 bytes and 3 special "
        f"tokens), got {vocab_size}. Raise vocab_size."
    )


def test_the_smallest_vocabulary_works():
    bytes_only = train_tokenizer(TEXTS, vocab_size=259)
    assert len(bytes_only) == 259
    assert len(encode(bytes_only, ["é"], max_length=10)[0]) == 3


@pytest.mark.parametrize("saved_as", ["folder", "tokenizer.json"])
def test_a_saved_tokenizer_comes_back(tokenizer, tmp_path, saved_as):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path if saved_as == "folder" else str(tmp_path / saved_as))
    assert encode(loaded, ANY_TEXT, max_length=50) == encode(tokenizer, ANY_TEXT, max_length=50)
    for name in ("pad_token_id", "eos_token_id", "mask_token_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name)


def edited(tokenizer, folder, **tokens):
    """Save a tokenizer with other special tokens, as others publish them."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if not k.endswith("_token")}
    path.write_text(json.dumps(config | tokens))
    text = (folder / "tokenizer.json").read_text()
    for name in ("<eos>", "<pad>", "<mask>"):  # so that no name is well known
        text = text.replace(name, name.replace("<", "<my "))
    (folder / "tokenizer.json").write_text(text)
    return folder


def test_padding_falls_back_to_the_end(tokenizer, tmp_path):
    loaded = load_tokenizer(edited(tokenizer, tmp_path, eos_token="<my eos>"))
    assert loaded.pad_token == loaded.eos_token == "<my eos>"
    assert loaded.mask_token is None


def test_the_end_falls_back_to_the_separator(tokenizer, tmp_path):
    loaded = load_tokenizer(edited(tokenizer, tmp_path, sep_token="<my eos>"))
    assert loaded.eos_token == "<my eos>"


def test_without_an_end_token_encoding_is_an_error(tokenizer, tmp_path):
    loaded = load_tokenizer(edited(tokenizer, tmp_path))
    with pytest.raises(ArgumentError) as caught:
        encode(loaded, ["x"], max_length=5)
    assert str(caught.value) == (
        "encode(tokenizer): expected a tokenizer with an end token, got eos_token=None. "
        "Name one of its tokens: tokenizer.eos_token = '</s>'."
    )


@pytest.mark.parametrize("case", ["missing", "empty folder", "broken file"])
def test_what_is_no_tokenizer_is_an_error(tmp_path, case):
    path = tmp_path / case
    if case == "empty folder":
        path.mkdir()
    elif case == "broken file":
        path.write_text("{")
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert caught.value.call == f"load_tokenizer({str(path)!r})"
    assert caught.value.expected.startswith("a folder with a tokenizer")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("tokenizer.save_pretrained(path).")


@pytest.mark.parametrize("name", ["tokenizers", "transformers"])
def test_a_missing_package_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArgumentError) as caught:
        train_tokenizer(TEXTS, vocab_size=300)
    assert str(caught.value) == (
        f"train_tokenizer(): expected the package {name}, got an installation without it. "
        "Install it: pip install 'gradaccum[recipes]'."
    )
