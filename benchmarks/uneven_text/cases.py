"""The cases by name, and what is aimed at."""

from dataclasses import dataclass

OURS = "gradaccum"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Args:
        title: For people.
        rounds: In how many rounds it takes part; None for all.
        same: Whether its effective batches are those of the other cases.
        exact: Whether its loss is that of the samples, so that gradients can be compared.
    """

    title: str
    rounds: int | None = None
    same: bool = True
    exact: bool = True


CASES = {
    "gradaccum": Case(title="gradaccum"),
    "plain": Case(title="plain PyTorch loop"),
    "accelerate": Case(title="Accelerate, weighted by tokens"),
    "accelerate_accumulate": Case(title="Accelerate, `accumulate()`", rounds=1),
    "fabric": Case(title="Lightning Fabric"),
    "trainer": Case(title="HF Trainer"),
    "trainer_group_by_length": Case(title='HF Trainer, "group_by_length"', same=False),
    "trainer_batch_rebalance": Case(title='HF Trainer, "batch_rebalance"'),
    "trainer_gradaccum_sampler": Case(title="HF Trainer + `ga.EffectiveBatchSampler`"),
    "bound": Case(title="bound: full rows, no padding", exact=False),
}
# Real tokens per second of gradaccum, as a multiple of another case's, at least.
TARGETS = {"trainer": 3.0, "accelerate": 3.0, "bound": 0.9}
