"""One case in its own process: train, and compare the first gradient with the reference."""

import importlib
from typing import Any

import torch

from benchmarks.uneven_text.recorder import Recorder, difference
from benchmarks.uneven_text.setting import Setting, build, reference_path

PLACES = {
    "plain": "by_hand.plain",
    "bound": "by_hand.bound",
    "accelerate": "with_accelerate.weighted",
    "accelerate_accumulate": "with_accelerate.accumulate",
    "fabric": "with_fabric.fabric",
    "trainer": "with_trainer.in_order",
    "trainer_group_by_length": "with_trainer.group_by_length",
    "trainer_batch_rebalance": "with_trainer.batch_rebalance",
    "trainer_gradaccum_sampler": "with_trainer.gradaccum_sampler",
    "gradaccum": "with_gradaccum.step",
}


def run(case: str, **settings: Any) -> dict[str, Any]:
    """Run a case; return its times, its tokens and its gradient's difference."""
    setting = Setting(**settings)
    job = build(setting)
    recorder = Recorder(job.model, job.optimizer)
    module, name = PLACES[case].split(".")
    train = getattr(importlib.import_module(f"benchmarks.uneven_text.{module}"), name)
    more = train(job) or {}
    reference = torch.load(reference_path(setting))
    return recorder.result() | {"gradient": difference(recorder.gradients, reference)} | more
