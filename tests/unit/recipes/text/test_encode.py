import copy
import subprocess
import sys
from itertools import chain

import pytest

from gradaccum.errors import ArgumentError
from gradaccum.recipes.text import encode as module
from gradaccum.recipes.text.encode import encode
from gradaccum.recipes.text.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abcdefgh"], vocab_size=259)  # bytes only: a letter is a token


def test_the_end_is_learnt(tokenizer):
    samples = encode(tokenizer, ["abc", "z"], max_length=10)
    assert [len(sample) for sample in samples] == [4, 2]
    assert {sample[-1] for sample in samples} == {tokenizer.eos_token_id}


@pytest.mark.parametrize("max_length", [3, 4, 5, 8, 100])
def test_pieces_lose_and_repeat_nothing(tokenizer, max_length):
    for length in range(1, 30):
        text = ("abcdefgh" * 4)[:length]
        samples = encode(tokenizer, [text], max_length=max_length)
        (whole,) = encode(tokenizer, [text], max_length=1_000)
        assert list(chain.from_iterable(samples)) == whole
        assert all(2 <= len(sample) <= max_length for sample in samples)
        assert len(samples) == -(-len(whole) // max_length)  # no more pieces than needed


def test_only_the_end_is_added(tokenizer):
    from tokenizers.processors import TemplateProcessing

    wrapping = copy.deepcopy(tokenizer)
    mask = ("<mask>", tokenizer.mask_token_id)
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        single="<mask> $A <mask>", special_tokens=[mask]
    )
    assert len(wrapping("abc")["input_ids"]) == 5
    assert encode(wrapping, ["abc"], max_length=9) == encode(tokenizer, ["abc"], max_length=9)


def test_empty_texts_give_no_sample(tokenizer):
    assert encode(tokenizer, [], max_length=5) == []
    assert encode(tokenizer, ["", "a", ""], max_length=5) == encode(tokenizer, ["a"], max_length=5)


def test_batches_do_not_show(tokenizer, monkeypatch):
    texts = ["a" * n for n in range(1, 20)]
    expected = encode(tokenizer, texts, max_length=7)
    monkeypatch.setattr(module, "_BATCH", 4)
    assert encode(tokenizer, tuple(texts), max_length=7) == expected


def test_a_long_text_makes_no_noise(tokenizer, tmp_path):
    # In a process of its own, because transformers warns once in a process and through logging.
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(tmp_path)
    script = (
        "import sys\n"
        "from gradaccum.recipes.text.encode import encode\n"
        "from gradaccum.recipes.text.tokenizer import load_tokenizer\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "print(tokenizer.model_max_length, len(encode(tokenizer, ['abc' * 10], max_length=16)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("8 2\n", "")


@pytest.mark.parametrize("max_length", [2, 0, -1])
def test_a_length_without_room_is_an_error(tokenizer, max_length):
    with pytest.raises(ArgumentError) as caught:
        encode(tokenizer, ["abc"], max_length=max_length)
    assert str(caught.value) == (
        f"encode(max_length={max_length}): expected 3 or more, got {max_length}. Raise max_length."
    )
