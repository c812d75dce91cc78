"""The budget on a CUDA device, where the allocator counts what the meter cannot see."""

import numpy as np
import pytest
import torch
from helpers.gpts import causal, gpt

import gradaccum as ga
from gradaccum.memory import AllocatorBytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


def text(count):
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(4.5, 1.0, count)), 10, 1000).astype(int)
    ids = [torch.randint(1, 4096, (length,)) for length in lengths]
    return [{"input_ids": one, "labels": one} for one in ids]


def build(memory):
    torch.manual_seed(0)
    large = {"vocab_size": 4096, "n_positions": 1024, "n_embd": 256, "n_layer": 6, "n_head": 4}
    model = gpt(device="cuda", **large)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pad = {"input_ids": 0, "labels": -100}
    return ga.accumulator(model, optimizer, causal, memory=memory, pad=pad, verify="never")


def test_the_allocator_stays_below_the_budget_and_near_it():
    torch.cuda.empty_cache()
    samples, budget = text(512), 1024 * MIB
    held = torch.cuda.memory_allocated()
    accumulator = build(budget)
    accumulator.step(samples)
    with AllocatorBytes(torch.device("cuda")) as meter:
        report = accumulator.step(samples)
    assert report.replays == 0
    assert meter.peak - held <= budget
    assert meter.peak - held >= 0.85 * budget
    assert report.peak_allocated >= meter.peak
    assert report.peak_reserved >= report.peak_allocated


def test_a_device_that_is_full_is_recovered_from():
    samples = text(64)
    expected = build("8GiB").step(samples)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    accumulator = build("8GiB")
    needed = torch.cuda.memory_allocated() + 700 * MIB
    torch.cuda.set_per_process_memory_fraction(needed / total)
    try:
        report = accumulator.step(samples)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
