import math
from collections import Counter

import pytest

from gradaccum.errors import ArgumentError
from gradaccum.recipes.text.entropy import unigram_entropy


def test_uniform_tokens_have_the_log_of_their_number():
    assert unigram_entropy([[0, 1], [2, 3]], skip_first=False) == pytest.approx(math.log(4))


def test_a_single_kind_of_token_has_none():
    entropy = unigram_entropy([[7, 7], [7]], skip_first=False)
    assert entropy == 0.0
    assert math.copysign(1, entropy) == 1  # 0.0, not -0.0


@pytest.mark.parametrize("skip_first", [True, False])
def test_agrees_with_counting_by_hand(skip_first):
    samples = [[5, 1, 1, 2], [9], [5, 2, 2, 2, 40_000]]
    counted = Counter(t for sample in samples for t in sample[1 if skip_first else 0 :])
    total = sum(counted.values())
    expected = -sum(n / total * math.log(n / total) for n in counted.values())
    assert unigram_entropy(samples, skip_first=skip_first) == pytest.approx(expected, rel=1e-12)


def test_skipping_the_first_changes_the_answer():
    samples = [[0, 1], [0, 2]]
    assert unigram_entropy(samples, skip_first=True) == pytest.approx(math.log(2))
    assert unigram_entropy(samples, skip_first=False) == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize(
    ("samples", "skip_first"), [([], False), ([[]], False), ([[3], [4]], True)]
)
def test_nothing_to_count_is_an_error(samples, skip_first):
    with pytest.raises(ArgumentError, match=f"without a token.*{len(samples)}|{len(samples)} sa"):
        unigram_entropy(samples, skip_first=skip_first)
