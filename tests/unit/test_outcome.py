import json

import pytest

from gradaccum.outcome import Counters, Outcome, StepReport, Term

REPORT = {
    "outcome": Outcome.STEPPED,
    "loss": 1.5,
    "weight": 4.0,
    "grad_norm": 2.0,
    "lr": 0.1,
    "samples": 3,
    "tokens": 12,
    "padded_tokens": 16,
    "micro_batches": 2,
    "optimizer_step": 7,
    "seconds": 0.5,
}


@pytest.mark.parametrize("outcome", Outcome)
def test_each_outcome_has_its_sentence(outcome):
    assert outcome.value.endswith(".")
    assert outcome.stepped == (outcome is Outcome.STEPPED)
    assert str(outcome) == outcome.name.lower()


def test_a_report_is_plain_json():
    report = StepReport(**REPORT, terms={"ce": Term(loss=1.0, weight=2.0)})
    plain = json.loads(json.dumps(report.as_dict()))
    expected = REPORT | {"outcome": "stepped", "padding": 0.25, "dropped": 0, "replays": 0}
    expected |= {"peak_allocated": None, "peak_reserved": None}
    assert plain == expected | {"terms": {"ce": {"loss": 1.0, "weight": 2.0}}}
    assert StepReport(**(REPORT | {"tokens": 0, "padded_tokens": 0})).padding == 0.0


def test_counters_move_apart():
    counters = Counters()
    assert counters.within(2) == Counters(micro_steps=2)
    counters = counters.after(outcome=Outcome.STEPPED, micro_batches=2, samples=3, tokens=9)
    counters = counters.after(
        outcome=Outcome.SKIPPED_NONFINITE, micro_batches=1, samples=2, tokens=4
    )
    assert counters.as_dict() == {
        "micro_steps": 3,
        "optimizer_steps": 1,
        "skipped": 1,
        "samples": 5,
        "tokens": 13,
    }
