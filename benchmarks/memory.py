"""Memory: is the peak as predicted, is the budget kept, and what does finding out cost?

Measured with the meter of live bytes, on the CPU: peaks of micro-batches of 20 shapes, in the
middle of an effective batch, against those predicted from a few small probes and those predicted on
fake tensors, without running. Then a budget over 200 optimizer steps of uneven text, the peak of
1 and of 1,024 accumulation steps, the time of the probes in optimizer steps, and whole modules of
the standard library in a fraction of a plain loop's memory.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run_case, table, verdict

CASES = ("gpt", "bert", "cnn")
PROBED, FAKE, USE, FLAT, PROBING, NAIVE = 0.02, 0.05, 0.9, 0.01, 2.0, 8.0


def measure(*, quick: bool) -> dict[str, Any]:
    """Run each case in a process of its own."""
    shapes = 4 if quick else 20
    sizes: dict[str, dict[str, Any]] = {
        "budget": {"steps": 3 if quick else 200, "memory": "64MiB"},
        "flat": {"steps": 16 if quick else 1024},
        "probing": {"steps": 2 if quick else 8},
        "long": {"memory": "300MiB", "naive": 2 if quick else 8, "length": 1024 if quick else 8192},
    }
    found = {name: run_case("memory", name, shapes=shapes) for name in CASES}
    found |= {name: run_case("memory", name, **options) for name, options in sizes.items()}
    return {"settings": sizes | {"shapes": shapes}, "cases": found}


def run(case: str, **options: Any) -> dict[str, Any]:
    """Run one case."""
    if case in CASES:
        return _accuracy(case, **options)
    ways: dict[str, Callable[..., dict[str, Any]]] = {
        "budget": _budget,
        "flat": _flat,
        "probing": _probing,
        "long": _long,
    }
    return ways[case](**options)


def _recipe(name: str, **told: Any) -> Any:
    """Build a recipe; of pictures, a small ResNet of transformers on tensors of their size."""
    from gradaccum.recipes import bert, gpt
    from gradaccum.recipes.recipe import Recipe
    from gradaccum.recipes.settings import settings

    if name != "cnn":
        module = {"gpt": gpt, "bert": bert}[name]
        return module.build(settings({**module.DEFAULTS, "recipe": name}, told))
    import transformers

    import gradaccum as ga

    def loss(model: Any, micro: Any) -> ga.Loss:
        return ga.losses.cross_entropy(model(micro["x"]).logits, micro["y"])

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    model = transformers.ResNetForImageClassification(config).train()
    return Recipe(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        train=[{"x": torch.randn(3, 128, 128), "y": k % 10} for k in range(32)],
        held_out=[],
    )


def _trial(recipe: Any, prepared: Any, feed: Any) -> Any:
    """Return a trial that runs in earnest."""
    from gradaccum.engine import Engine
    from gradaccum.loss import checked_terms
    from gradaccum.memory import needs_of
    from gradaccum.protocols import LocalSync
    from gradaccum.trial import EngineTrial
    from gradaccum.update import Update

    update = Update(optimizers=(recipe.optimizer,))
    return EngineTrial(
        engine=Engine(
            model=recipe.model,
            update=update,
            schedulers=(),
            nonfinite="raise",
            sync=LocalSync(),
        ),
        model=recipe.model,
        update=update,
        needs=partial(needs_of, recipe.model, [recipe.optimizer]),
        feed=feed,
        forward=lambda micro: checked_terms(recipe.loss(recipe.model, micro), call="loss"),
        prepared=prepared,
    )


def _accuracy(case: str, *, shapes: int) -> dict[str, Any]:
    """Compare predicted and measured peaks of micro-batches of many shapes."""
    from gradaccum.collate import collate_function
    from gradaccum.fake_trial import FakeTrial
    from gradaccum.feed import Feed
    from gradaccum.integrations.transformers import masks_as_in_earnest
    from gradaccum.memory import Budget
    from gradaccum.prepared import Prepared
    from gradaccum.probing import measured

    recipe = _recipe(case)
    samples = [recipe.train[k] for k in range(min(64, len(recipe.train)))]
    feed = Feed(collate=collate_function(recipe.pad))
    prepared = Prepared.of(samples, feed.length)
    lengths = prepared.lengths
    trial = _trial(recipe, prepared, feed)
    needs = trial.needs()
    fake = FakeTrial(
        model=recipe.model,
        optimizers=[recipe.optimizer],
        loss=recipe.loss,
        feed=feed,
        prepared=prepared,
    )
    rng = np.random.default_rng(0)
    found = []
    with trial.opened():
        probed = measured(len(samples), lengths, trial, budget=Budget(bytes=2**30))
    with masks_as_in_earnest(), fake.opened():
        unrun = measured(len(samples), lengths, fake)
    with trial.opened():
        for k in range(shapes):
            count = k + 1 if lengths is None else int(rng.integers(1, 25))
            positions = np.arange(count)
            if lengths is not None:  # neighbours in length, as a cut makes them
                order = np.argsort(lengths, kind="stable")
                start = int(rng.integers(0, len(order) - count + 1))
                positions = order[start : start + count]
            probe = trial.probe(positions)
            peak = needs.rest + probe.peak
            found.append(
                {
                    "samples": probe.count,
                    "length": probe.length,
                    "peak": peak,
                    "probed": probed.predicted(probe.count, probe.length) / peak - 1,
                    "fake": unrun.predicted(probe.count, probe.length) / peak - 1,
                }
            )
    return {"rest": needs.rest, "margin": probed.margin, "shapes": found}


class _Peaks:
    """A loss that notes the peak of the micro-batch before."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.meter, self.peaks = loss, None, []

    def __call__(self, model: Any, micro: Any) -> Any:
        """Note, and go on."""
        if self.meter is not None:
            self.peaks.append(self.meter.peak)
            self.meter.reset_peak()
        return self.loss(model, micro)


def _metered(recipe: Any) -> Any:
    """Return a meter that has seen what is there already."""
    from gradaccum.memory import LiveBytes

    meter = LiveBytes()
    state = [v for one in recipe.optimizer.state.values() for v in one.values()]
    meter.follow([*recipe.model.parameters(), *recipe.model.buffers(), *state])
    return meter


def _budget(*, steps: int, memory: str) -> dict[str, Any]:
    """Keep to a budget over many optimizer steps; peaks of micro-batches, and of steps."""
    import gradaccum as ga

    recipe = _recipe("gpt")
    loss = _Peaks(recipe.loss)
    batches = ga.effective_batches(recipe.train, 64, lengths=recipe.lengths, steps=steps + 1)
    accumulator = ga.accumulator(
        recipe.model, recipe.optimizer, loss, memory=memory, pad=recipe.pad, verify="never"
    )
    batches = iter(batches)
    accumulator.step(next(batches))  # the optimizer's state is there from now on
    limit = accumulator.cut.cap.limit
    micro, whole = [], []
    with _metered(recipe) as meter:
        loss.meter = meter
        for batch in batches:
            loss.peaks.clear()
            meter.reset_peak()
            report = accumulator.step(batch)
            peaks = [*loss.peaks[1:], meter.peak]  # the first is of what was before
            micro += peaks
            whole.append(max(peaks))
            if report.replays:
                raise RuntimeError("ran out of memory")
    return {
        "budget": limit,
        "steps": len(whole),
        "micro_batches": len(micro),
        "above": sum(peak > limit for peak in micro),
        "mean_use_of_steps": mean(whole) / limit,
        "mean_use_of_micro_batches": mean(micro) / limit,
        "most": max(whole) / limit,
    }


def _flat(*, steps: int) -> dict[str, Any]:
    """Compare the peak of 1 accumulation step with that of many."""
    import gradaccum as ga
    from gradaccum.memory import LiveBytes

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 128),
        torch.nn.Tanh(),
        torch.nn.Linear(128, 128),
        torch.nn.Linear(128, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = ga.accumulator(
        model,
        optimizer,
        lambda model, rows: ga.Loss(model(rows).square().sum(), len(rows)),
        micro_batch_size=8192,
        verify="never",
    )
    rows = torch.randn(8192 * steps, 16)  # there for both
    peaks = []
    for count in (1, steps):
        meter = LiveBytes()
        meter.follow([*model.parameters(), rows])
        with meter:
            report = accumulator.step(rows[: 8192 * count])
        if report.micro_batches != count:
            raise RuntimeError(report)
        peaks.append(meter.peak - rows.nbytes)
    return {"steps": steps, "peaks": peaks, "growth": peaks[1] / peaks[0] - 1}


def _probing(*, steps: int) -> dict[str, Any]:
    """Compare the time of the probes with that of an optimizer step."""
    import gradaccum as ga
    from gradaccum.collate import collate_function
    from gradaccum.feed import Feed
    from gradaccum.memory import Budget
    from gradaccum.prepared import Prepared
    from gradaccum.probing import measured

    found = {}
    for name in CASES:
        recipe = _recipe(name)
        samples = [recipe.train[k] for k in range(min(64, len(recipe.train)))]
        feed = Feed(collate=collate_function(recipe.pad))
        prepared = Prepared.of(samples, feed.length)
        limit = 200 * 2**20 if name != "cnn" else 400 * 2**20
        begun = perf_counter()
        trial = _trial(recipe, prepared, feed)
        with trial.opened():
            measured(len(samples), prepared.lengths, trial, budget=Budget(bytes=limit))
        probing = perf_counter() - begun
        accumulator = ga.accumulator(
            recipe.model,
            recipe.optimizer,
            recipe.loss,
            memory=limit,
            pad=recipe.pad,
            verify="never",
        )
        seconds = [accumulator.step(samples).seconds for _ in range(steps + 1)][1:]
        found[name] = {"probing": probing, "step": median(seconds)}
    return found


def _long(*, memory: str, naive: int, length: int) -> dict[str, Any]:
    """Train on whole modules under a budget, and let a plain loop try the same samples."""
    import gradaccum as ga
    from gradaccum.cli.fitted import with_levers
    from gradaccum.collate import collate_function
    from gradaccum.memory import LiveBytes
    from gradaccum.recipes.settings import settings

    told = {"max_length": length, "memory": memory, "effective_batch": naive}
    recipe = _recipe("gpt", **told)
    longest = np.argsort(-recipe.lengths, kind="stable")[:naive].tolist()
    samples = [recipe.train[k] for k in longest]

    micro = collate_function(recipe.pad)(samples)
    meter = LiveBytes()
    meter.follow([*recipe.model.parameters(), *micro.values()])
    begun = perf_counter()
    with meter:
        loss = recipe.loss(recipe.model, micro)
        (loss.sum / loss.weight).backward()
        plain = [p.grad.clone() for p in recipe.model.parameters()]
    naive_seconds, naive_peak = perf_counter() - begun, meter.peak
    recipe.model.zero_grad()

    recipe, levers = with_levers(recipe, settings({"recipe": "gpt"}, told))
    gradients: list[Any] = []
    recipe.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in recipe.model.parameters())
    )
    accumulator = ga.accumulator(
        recipe.model, recipe.optimizer, recipe.loss, memory=memory, pad=recipe.pad, verify="never"
    )
    weight = float(loss.weight)
    with _metered(recipe) as meter:
        report = accumulator.step(samples)
        first = meter.peak
    with _metered(recipe) as meter:
        again = accumulator.step(samples)
    difference = max(
        float((a / weight - b).norm() / b.norm()) for a, b in zip(gradients, plain, strict=False)
    )
    return {
        "levers": str(levers),
        "samples": naive,
        "tokens": [int(recipe.lengths[k]) for k in longest],
        "budget": accumulator.cut.cap.limit,
        "peak": max(first, meter.peak),
        "naive_peak": naive_peak,
        "seconds": again.seconds,
        "naive_seconds": naive_seconds,
        "micro_batches": report.micro_batches,
        "largest_gradient_difference": difference,
    }


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    cases = result["cases"]
    failed = [name for name, case in cases.items() if "failed" in case]
    lines = [f"Failed: {', '.join(failed)}.", ""] if failed else []
    rows, worst = [], {"probed": 0.0, "fake": 0.0}
    for name in CASES:
        if name in failed:
            continue
        shapes = cases[name]["shapes"]
        errors = {way: [abs(shape[way]) for shape in shapes] for way in worst}
        worst = {way: max(worst[way], *errors[way]) for way in worst}
        peaks = [shape["peak"] / 2**20 for shape in shapes]
        rows.append(
            [
                name,
                f"{len(shapes)}",
                f"{min(peaks):.0f} to {max(peaks):.0f} MiB",
                *(f"{100 * max(errors[way]):.3f} %" for way in worst),
            ]
        )
    head = ["", "shapes", "peaks", "largest error, probed", "largest error, without running"]
    lines += [*table(head, rows), ""]
    lines += [
        f"- Target: predicted from probes within {PROBED:.0%}, without running within {FAKE:.0%}. "
        f"Measured {worst['probed']:.3%} and {worst['fake']:.3%}: "
        f"{verdict(worst['probed'], PROBED, at_least=False)}, "
        f"{verdict(worst['fake'], FAKE, at_least=False)}."
    ]
    if "budget" not in failed:
        lines.append(_told_budget(cases["budget"]))
    if "flat" not in failed:
        flat = cases["flat"]
        lines.append(
            f"- Target: the peaks of 1 and of {flat['steps']:,} accumulation steps within "
            f"{FLAT:.0%}. Measured {flat['growth']:+.3%}: "
            f"{verdict(abs(flat['growth']), FLAT, at_least=False)}."
        )
    if "probing" not in failed:
        ratios = {n: cases["probing"][n]["probing"] / cases["probing"][n]["step"] for n in CASES}
        told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        lines.append(
            f"- Target: probing takes less than {PROBING:.0f} optimizer steps. Measured {told}: "
            f"{verdict(max(ratios.values()), PROBING, at_least=False)}."
        )
    if "long" not in failed:
        lines.append(_told_long(cases["long"]))
    return lines


def _told_budget(found: Mapping[str, Any]) -> str:
    use = found["mean_use_of_steps"]
    return (
        f"- Target: over {found['steps']} steps of uneven text no micro-batch above the budget of "
        f"{found['budget'] / 2**20:.0f} MiB, and at least {USE:.0%} of it used. Of "
        f"{found['micro_batches']:,} micro-batches {found['above']} were above; the largest of a "
        f"step used {use:.1%} on average, all of them {found['mean_use_of_micro_batches']:.1%}: "
        f"{verdict(use if not found['above'] else 0.0, USE, at_least=True)}."
    )


def _told_long(found: Mapping[str, Any]) -> str:
    ratio = found["naive_peak"] / found["budget"]
    kept = found["peak"] <= found["budget"]  # probes included
    return (
        f"- Target: whole modules where a plain loop needs at least {NAIVE:.0f} times the budget. "
        f"{found['samples']} modules of {max(found['tokens']):,} tokens at once need "
        f"{found['naive_peak'] / 2**20:,.0f} MiB; with {found['levers']} in "
        f"{found['micro_batches']} micro-batches {found['peak'] / 2**20:,.0f} of "
        f"{found['budget'] / 2**20:,.0f} MiB, in {found['seconds'] / found['naive_seconds']:.2f} "
        f"times the time; gradients differ by {found['largest_gradient_difference']:.1e}. "
        f"{ratio:.1f} times: {verdict(ratio if kept else 0.0, NAIVE, at_least=True)}."
    )
