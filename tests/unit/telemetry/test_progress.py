"""The display shows what the last step did, in a terminal and elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import gradaccum as ga
from gradaccum.telemetry import JsonLines


def report(**changes):
    values = {
        "outcome": ga.Outcome.STEPPED,
        "loss": 2.5,
        "weight": 90.0,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "samples": 64,
        "tokens": 900,
        "padded_tokens": 1000,
        "micro_batches": 12,
        "optimizer_step": 1,
        "seconds": 0.5,
    }
    return ga.StepReport(**values | changes)


def drawn(items, accumulator=None, *, terminal, **more):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    seen = list(ga.track(items, accumulator, console=console, **more))
    return seen, console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("make", [list, iter, lambda items: (x for x in items)])
def test_hands_on_every_item(make, terminal):
    seen, _ = drawn(make([3, 1, 2]), terminal=terminal)
    assert seen == [3, 1, 2]


@pytest.mark.parametrize("terminal", [True, False])
def test_shows_the_facts_of_the_last_step(terminal):
    _, text = drawn([1, 2], SimpleNamespace(report=report()), terminal=terminal)
    for fact in ("2.5000", "3.00e-04", "1,800 tokens/s", "64 samples", "12 micro-batches"):
        assert fact in text
    assert "10.0% padding" in text
    assert "2/2" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_shows_the_loss_of_each_of_several(terminal):
    reports = {
        "discriminator": report(loss=1.25, tokens=0, padded_tokens=0, seconds=0.3),
        "generator": report(loss=0.75, tokens=0, padded_tokens=0, seconds=0.1, micro_batches=3),
        "not yet": None,
    }
    each = {name: SimpleNamespace(report=one) for name, one in reports.items()}
    _, text = drawn([1], each, terminal=terminal)
    assert "discriminator 1.2500  generator 0.7500  lr 3.00e-04" in text
    assert "160 samples/s  64 samples  12 micro-batches" in text, "the same 64, in both times"
    assert "not yet" not in text


def test_several_of_which_one_was_skipped():
    reports = [report(), report(outcome=ga.Outcome.SKIPPED_EMPTY), report()]
    each = {str(k): SimpleNamespace(report=one) for k, one in enumerate(reports)}
    _, text = drawn([1], each, terminal=False)
    assert text.count("skipped_empty") == 1
    assert "stepped" not in text


def test_samples_per_second_where_no_tokens_are_known():
    source = SimpleNamespace(report=report(tokens=0, padded_tokens=0))
    _, text = drawn([1], source, terminal=False)
    assert "128 samples/s" in text
    assert "padding" not in text


def test_says_that_a_step_was_skipped():
    source = SimpleNamespace(report=report(outcome=ga.Outcome.SKIPPED_EMPTY))
    assert "skipped_empty" in drawn([1], source, terminal=False)[1]


def test_an_error_in_the_loop_goes_up_and_the_display_ends():
    console = Console(file=io.StringIO(), force_terminal=True)

    def loop():
        for _ in ga.track([1, 2], console=console):
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert not console._live_stack


def test_json_lines_are_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as sink:
        sink.write(report(), epoch=1)
        line = path.read_text()
        sink.write(report())
    assert '"outcome": "stepped"' in line
    assert '"epoch": 1' in line
    assert '"padding": 0.09' in line
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_break_after_a_step_shows_it(terminal):
    source = SimpleNamespace(report=None)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    for item in ga.track([1, 2, 3, 4, 5], source, console=console):
        source.report = report(optimizer_step=item, loss=float(item))
        if item == 3:
            break
    text = console.file.getvalue()
    assert "3/5" in text
    assert "loss 3.0000" in text


def test_facts_stay_on_one_line():
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    list(ga.track([1], SimpleNamespace(report=report()), console=console))
    assert "padding" not in console.file.getvalue()
    assert "\u2026" in console.file.getvalue()
