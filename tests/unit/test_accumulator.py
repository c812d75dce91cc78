import copy
import json
from contextlib import suppress

import pytest
import torch
from helpers.training import Recorder, Slope, exactly, summed, tokens
from torch import nn

import gradaccum as ga
from gradaccum.accumulator import Phase
from gradaccum.errors import LossError, NonFiniteError, PhaseError
from gradaccum.feed import Feed
from gradaccum.outcome import Counters
from gradaccum.partition import FixedCut
from gradaccum.sizing import Told
from gradaccum.update import Update


class Interrupted(Exception):
    """What a test raises in the user's code."""


class Parts:
    """A slope, an optimizer that notes gradients, and an accumulator of both doors."""

    def __init__(self, loss=summed, size=1, **options):
        self.model = Slope()
        self.optimizer = Recorder(self.model.parameters())
        self.accumulator = ga.accumulator(
            self.model, self.optimizer, loss, micro_batch_size=size, verify="never", **options
        )

    def backward(self, rows):
        return self.accumulator.backward(summed(self.model, rows))

    def loop(self, micro_batches, body=None):
        """Run one effective batch through a loop of one's own."""
        for rows in self.accumulator.over(micro_batches, steps=len(micro_batches)):
            (body or self.backward)(rows)

    @property
    def gradients(self):
        return [gradient.tolist() for (gradient,) in self.optimizer.gradients]

    @property
    def state(self):
        held = self.model.w.grad
        return (
            self.model.w.item(),
            held if held is None else held.item(),
            self.accumulator.counters,
            self.accumulator.phase.name,
        )

    def finishes_cleanly(self, before):
        """Check that nothing of a failed effective batch is left, in the next one either."""
        assert self.state == before
        stepped = len(self.gradients)
        self.loop([tokens(2.0), tokens(4.0)])
        assert self.gradients[stepped:] == [exactly([3.0])]
        assert self.accumulator.counters.micro_steps == before[2].micro_steps + 2


@pytest.fixture
def parts():
    return Parts()


def test_phases_of_step(parts):
    phases = []
    parts.model.w.register_hook(lambda _: phases.append(parts.accumulator.phase.name))
    parts.optimizer.register_step_pre_hook(lambda *_: phases.append(parts.accumulator.phase.name))
    assert parts.accumulator.phase.name == "IDLE"
    parts.accumulator.step(tokens(1.0, 2.0))
    assert phases == ["SUMMING", "SUMMING", "CLOSING"]
    assert parts.accumulator.phase.name == "IDLE"


def test_the_report_of_a_step(parts):
    assert parts.accumulator.report is None
    report = parts.accumulator.step(tokens(1.0, 2.0, 6.0))
    assert parts.accumulator.report is report
    assert (report.loss, report.weight, report.grad_norm, report.lr) == (
        0.0,
        3.0,
        exactly(3.0),
        1.0,
    )
    assert (report.samples, report.micro_batches, report.optimizer_step) == (3, 3, 1)
    assert report.seconds > 0
    assert parts.accumulator.step(tokens(1.0)).optimizer_step == 2


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_in_the_loss_leaves_nothing(at):
    calls = []

    def loss(model, rows):
        calls.append(rows)
        if len(calls) == at + 1:
            raise Interrupted
        return summed(model, rows)

    parts = Parts(loss)
    before = parts.state
    with pytest.raises(Interrupted):
        parts.accumulator.step(tokens(1.0, 2.0, 3.0))
    parts.finishes_cleanly(before)


@pytest.mark.parametrize("where", ["backward", "collate", "optimizer"])
def test_an_error_anywhere_leaves_nothing(where):
    def interrupt(*_):
        raise Interrupted

    parts = Parts(collate=interrupt if where == "collate" else None)
    before = parts.state
    handle = None
    if where == "backward":
        handle = parts.model.w.register_hook(interrupt)
    elif where == "optimizer":
        handle = parts.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        parts.accumulator.step([1.0, 2.0] if where == "collate" else tokens(1.0, 2.0))
    if handle is not None:
        handle.remove()
    parts.finishes_cleanly(before)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("after_backward", [False, True])
def test_an_error_in_the_own_loop_leaves_nothing(parts, at, after_backward):
    before = parts.state

    def body(rows):
        if after_backward or rows != at:
            parts.backward(rows)
        if rows == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        parts.loop([tokens(float(k)) for k in range(5)], body)
    parts.finishes_cleanly(before)


def test_leaving_the_own_loop_drops_the_open_effective_batch(parts):
    for k, rows in enumerate(parts.accumulator.over([tokens(9.0)] * 5, steps=2)):
        if k == 2:
            after_one_step = parts.state
        parts.backward(rows)
        if k == 2:
            break
    assert parts.gradients == [exactly([9.0])]
    assert after_one_step[1:] == (None, after_one_step[2], "SUMMING")
    parts.finishes_cleanly((*after_one_step[:3], "IDLE"))


@pytest.mark.parametrize("closed", ["in the middle", "after", "never"])
def test_a_loop_that_something_still_holds(parts, closed):
    held = iter(parts.accumulator.over([tokens(9.0)] * 5, steps=5))  # as a traceback does
    parts.backward(next(held))

    def body(rows):
        parts.backward(rows)
        if closed == "in the middle":
            held.close()

    parts.loop([tokens(2.0), tokens(4.0)], body)
    if closed == "after":
        held.close()
    assert parts.gradients == [exactly([3.0])]
    assert parts.accumulator.counters.micro_steps == 2


@pytest.mark.parametrize("other", ["step", "over"])
def test_another_effective_batch_in_the_middle_is_not_silent(parts, other):
    loop = parts.accumulator.over([tokens(9.0)] * 4, steps=4)
    parts.backward(next(loop))
    if other == "step":
        parts.accumulator.step(tokens(1.0, 3.0))
    else:
        parts.loop([tokens(1.0), tokens(3.0)])
    assert parts.gradients == [exactly([2.0])]
    counters = parts.accumulator.counters
    assert counters.micro_steps == 2
    with pytest.raises(PhaseError, match="in the middle"):
        next(loop)
    assert parts.accumulator.counters == counters
    assert parts.accumulator.phase.name == "IDLE"


def test_backward_twice(parts):
    before = parts.state

    def body(rows):
        parts.backward(rows)
        parts.backward(rows)

    with pytest.raises(PhaseError, match="one call for each micro-batch"):
        parts.loop([tokens(1.0)] * 2, body)
    parts.finishes_cleanly(before)


def test_backward_outside_of_a_loop(parts):
    with pytest.raises(PhaseError, match="no micro-batch waiting"):
        parts.backward(tokens(1.0))
    parts.loop([tokens(1.0)])
    with pytest.raises(PhaseError, match="no micro-batch waiting"):
        parts.backward(tokens(1.0))
    assert parts.gradients == [exactly([1.0])]


@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_a_micro_batch_without_backward_counts_for_nothing(parts, left_out):
    for k, rows in enumerate(parts.accumulator.over([tokens(4.0**k) for k in range(4)], steps=4)):
        if k != left_out:
            parts.backward(rows)
    assert parts.gradients == [exactly([(1 + 4 + 16 + 64 - 4**left_out) / 3])]
    assert parts.accumulator.counters.micro_steps == 3


def test_no_backward_at_all(parts):
    def loop():
        for _ in parts.accumulator.over([tokens(1.0)] * 3, steps=2):
            pass

    with pytest.raises(PhaseError, match=r"in place of loss\.backward\(\)"):
        loop()
    assert parts.gradients == []
    assert parts.accumulator.phase is Phase.IDLE


def test_an_effective_batch_that_is_left_out_later_is_empty(parts):
    for k, rows in enumerate(parts.accumulator.over([tokens(1.0)] * 4, steps=2)):
        if k < 2:
            parts.accumulator.backward(summed(parts.model, rows))
    assert parts.accumulator.report.outcome is ga.Outcome.SKIPPED_EMPTY
    assert parts.accumulator.counters.samples == 2  # those that were left out were not seen


def test_a_backward_by_hand_is_noticed(parts):
    def loop():
        for rows in parts.accumulator.over([tokens(1.0)], steps=1):
            parts.model(rows).sum().backward()
            parts.accumulator.backward(summed(parts.model, rows))

    with pytest.raises(PhaseError, match="expected no change from outside"):
        loop()


def test_a_backward_by_hand_in_the_last_micro_batch_is_noticed(parts):
    def loop():
        for k, rows in enumerate(parts.accumulator.over([tokens(1.0)] * 2, steps=2)):
            if k == 0:
                parts.accumulator.backward(summed(parts.model, rows))
            else:
                parts.model(rows).sum().backward()

    with pytest.raises(PhaseError, match="expected no change from outside"):
        loop()
    assert parts.gradients == []


def test_a_scheduler_that_raises_does_so_after_the_step_is_counted(parts):
    optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1)
    accumulator = ga.accumulator(
        parts.model, optimizer, summed, scheduler=scheduler, micro_batch_size=1, verify="never"
    )
    accumulator.step(tokens(1.0, 2.0))
    with pytest.raises(ValueError, match="total"):
        accumulator.step(tokens(1.0, 2.0))
    assert accumulator.counters.optimizer_steps == accumulator.report.optimizer_step
    assert accumulator.counters.samples == 2 * accumulator.counters.optimizer_steps
    assert accumulator.phase is Phase.IDLE


@pytest.mark.parametrize("steps", [0, -1, 2.0, None, True])
def test_steps_are_whole_numbers(parts, steps):
    with pytest.raises(ValueError, match=r"over\(loader, steps="):
        parts.accumulator.over([tokens(1.0)], steps=steps)
    if steps is not None:
        with pytest.raises(ValueError, match=r"steps\(counters\)"):
            next(parts.accumulator.over([tokens(1.0)], steps=lambda counters: steps))


def test_an_empty_loader(parts):
    assert list(parts.accumulator.over([], steps=2)) == []
    assert parts.accumulator.phase.name == "IDLE"


def test_backward_of_a_loss_or_of_a_sum_with_its_weight(parts):
    for k, rows in enumerate(parts.accumulator.over([tokens(2.0, 4.0)] * 2, steps=2)):
        if k:
            report = parts.accumulator.backward(parts.model(rows).sum(), weight=torch.tensor(2))
        else:
            assert parts.backward(rows) is None
    assert parts.gradients == [exactly([3.0])]
    assert report.weight == 4


@pytest.mark.parametrize("given", ["sum", "loss and weight", "mapping and weight"])
def test_a_weight_that_is_missing_or_told_twice(parts, given):
    def body(rows):
        loss = summed(parts.model, rows)
        if given == "sum":
            parts.accumulator.backward(loss.sum)
        else:
            parts.accumulator.backward({"": loss} if "mapping" in given else loss, weight=1)

    with pytest.raises(LossError, match=r"accumulator\.backward") as caught:
        parts.loop([tokens(1.0)], body)
    assert parts.gradients == []
    assert given != "sum" or caught.value.got == "no weight"


@pytest.mark.parametrize("door", ["step", "over"])
def test_several_terms_without_weights_beforehand(door):
    def terms(model, rows):
        return {"a": summed(model, rows), "b": ga.Loss(model(rows).sum(), 1)}

    parts = Parts(terms)
    before = parts.state

    def backward(rows):
        parts.accumulator.backward(terms(parts.model, rows))

    def run():
        if door == "step":
            parts.accumulator.step(tokens(1.0, 2.0))
        parts.loop([tokens(1.0)] * 2, backward)

    with pytest.raises(LossError, match="a, b") as caught:
        run()
    wanted = {"step": "accumulator(..., weigh=", "over": "accumulator.step(batch) with weigh="}
    assert wanted[door] in caught.value.remedy
    parts.finishes_cleanly(before)


def test_weights_that_disagree_with_the_loss():
    parts = Parts(weigh=lambda row: 2)
    before = parts.state
    with pytest.raises(LossError, match="4 by weigh and 2 by the loss"):
        parts.accumulator.step(tokens(1.0, 2.0))
    parts.finishes_cleanly(before)


def test_a_sum_without_a_graph():
    parts = Parts(lambda model, rows: ga.Loss(model(rows).sum().detach(), len(rows)))
    before = parts.state
    with pytest.raises(LossError, match="undetached"):
        parts.accumulator.step(tokens(1.0))
    parts.finishes_cleanly(before)


def test_a_sum_without_a_graph_that_weighs_nothing():
    def loss(model, rows):
        return summed(model, rows) if rows[0] else ga.Loss(torch.zeros(()), 0)

    parts = Parts(loss)
    assert parts.accumulator.step(tokens(0.0, 5.0)).weight == 1
    assert parts.gradients == [exactly([5.0])]


def test_a_loss_that_reaches_no_parameter_of_the_optimizer():
    models = nn.ModuleList([Slope(), Slope(start=1.0)])
    optimizer = torch.optim.AdamW(models[0].parameters())
    accumulator = ga.accumulator(models, optimizer)
    for rows in accumulator.over([tokens(1.0, 5.0)] * 2, steps=2):
        report = accumulator.backward(summed(models[1], rows))
    assert (report.loss, report.grad_norm) == (3.0, 0.0)
    assert models[1].w.grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("door", ["step", "over"])
def test_what_is_not_finite_raises(door, value):
    parts = Parts()
    before = parts.state

    def run():
        if door == "step":
            parts.accumulator.step(tokens(1.0, value))
        parts.loop([tokens(1.0), tokens(value)])

    with pytest.raises(NonFiniteError, match="skip_step"):
        run()
    parts.finishes_cleanly(before)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_if_told(where):
    def loss(model, rows):
        bad = torch.where(rows.sum() > 5, torch.nan, 1.0)
        total = model(rows).sum()
        if where == "gradient":  # the loss stays finite
            total.register_hook(lambda grad: grad * bad)
            return ga.Loss(total, len(rows))
        return ga.Loss(total + bad - 1, len(rows))

    parts = Parts(loss, nonfinite="skip_step")
    reports = [parts.accumulator.step(tokens(1.0, value)) for value in (3.0, 9.0, 5.0)]
    assert [str(report.outcome) for report in reports] == [
        "stepped",
        "skipped_nonfinite",
        "stepped",
    ]
    assert [report.optimizer_step for report in reports] == [1, 1, 2]
    assert parts.gradients == [exactly([2.0]), exactly([3.0])]
    counters = parts.accumulator.counters
    assert (counters.optimizer_steps, counters.skipped, counters.samples) == (2, 1, 6)


def test_a_loop_goes_on_behind_an_error_that_was_caught(parts):
    loader = [tokens(1.0), tokens(float("nan")), tokens(2.0), tokens(4.0)]
    for rows in parts.accumulator.over(loader, steps=2):
        with suppress(NonFiniteError):
            parts.backward(rows)
    assert parts.gradients == [exactly([3.0])]
    assert parts.accumulator.counters.micro_steps == 2


def test_state_is_plain_and_is_taken_over(parts):
    parts.accumulator.step(tokens(1.0, 2.0))
    state = json.loads(json.dumps(parts.accumulator.state_dict()))
    other = Parts()
    other.accumulator.load_state_dict(state)
    assert other.accumulator.counters == parts.accumulator.counters
    assert other.accumulator.step(tokens(1.0)).optimizer_step == 2


def test_no_state_in_the_middle(parts):
    for rows in parts.accumulator.over([tokens(1.0)], steps=2):
        with pytest.raises(PhaseError, match="SUMMING"):
            parts.accumulator.state_dict()
        parts.accumulator.backward(summed(parts.model, rows))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": 1},
        {"counters": {}},
        {"counters": Counters().as_dict() | {"micro_steps": "x"}},
        {"counters": Counters().as_dict() | {"samples": 2.9}},
        {"counters": Counters().as_dict() | {"tokens": -5}},
        {"counters": Counters().as_dict() | {"more": 1}},
        None,
    ],
)
def test_a_state_of_something_else_is_refused(parts, state):
    with pytest.raises(ValueError, match="returned"):
        parts.accumulator.load_state_dict(state)


def test_evaluation_is_the_mean_over_all_samples():
    model = nn.Sequential(Slope(start=2.0), nn.Dropout(0.9))
    accumulator = ga.accumulator(
        model, Recorder(model.parameters()), summed, micro_batch_size=2, verify="never"
    )
    found = accumulator.evaluate(tokens(1.0, 2.0, 6.0))
    assert (found.loss, found.samples, found.tokens, found.terms) == (6.0, 3, 0, {})
    assert model.training
    assert model[0].w.grad is None
    assert accumulator.counters == type(accumulator.counters)()


def test_evaluation_of_several_terms_needs_no_weights_beforehand():
    def terms(model, rows):
        return {"a": summed(model, rows), "b": ga.Loss(model(rows).sum(), 1)}

    parts = Parts(terms)
    parts.model.w.data.fill_(1.0)
    found = parts.accumulator.evaluate(tokens(2.0, 4.0))
    assert {name: (term.loss, term.weight) for name, term in found.terms.items()} == {
        "a": (3.0, 2.0),
        "b": (3.0, 2.0),
    }
    assert found.loss == 6.0


def test_evaluation_puts_modes_back_after_an_error():
    def loss(model, rows):
        raise Interrupted

    parts = Parts(loss)
    with pytest.raises(Interrupted):
        parts.accumulator.evaluate(tokens(1.0))
    assert parts.model.training


def test_gradients_from_before_are_not_added(parts):
    parts.model.w.grad = torch.full_like(parts.model.w, 99.0)
    parts.accumulator.step(tokens(1.0))
    assert parts.gradients == [exactly([1.0])]


def test_a_scheduler_of_the_loss_gets_the_mean():
    model = Slope(start=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    accumulator = ga.accumulator(
        model, optimizer, summed, micro_batch_size=1, scheduler=scheduler, verify="never"
    )
    accumulator.step(tokens(2.0, 4.0))
    assert scheduler.best == exactly(3.0)


def test_samples_of_any_cut_make_the_same_step():
    reference = None
    for size in (1, 2, 3, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        before = copy.deepcopy(model.state_dict())
        accumulator = ga.accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, x: ga.Loss.of(model(x).square()),
            micro_batch_size=size,
            max_grad_norm=0.1,
        )
        accumulator.step(torch.arange(15, dtype=torch.float64).view(5, 3))
        moved = torch.cat([(v - before[k]).flatten() for k, v in model.state_dict().items()])
        reference = moved if reference is None else reference
        torch.testing.assert_close(moved, reference, rtol=1e-10, atol=1e-14)


class TwoRanks:
    """A stand-in for another rank that has the same sums and weights."""

    rank, ranks = 0, 2

    def __init__(self):
        self.done = []

    def reduce(self, parameters):
        self.done.append("reduce")
        for parameter in parameters:
            parameter.grad *= 2

    def totals(self, numbers):
        self.done.append("totals")
        return {name: 2 * number for name, number in numbers.items()}


@pytest.mark.parametrize("door", ["step", "over"])
def test_ranks_reduce_once_when_all_micro_batches_are_in(door):
    model, sync = Slope(), TwoRanks()
    optimizer = Recorder(model.parameters())
    accumulator = ga.Accumulator(
        model=model,
        update=Update(optimizers=(optimizer,)),
        loss=summed,
        feed=Feed(),
        sizing=Told(FixedCut(size=2)),
        sync=sync,
    )
    rows = tokens(1.0, 2.0, 3.0, 6.0, 3.0)
    if door == "step":
        report = accumulator.step(rows)
    else:
        for micro in accumulator.over(rows.split(2), steps=3):
            report = accumulator.backward(summed(model, micro))
    assert sync.done == ["reduce", "totals", "totals"]
    assert (report.weight, report.samples) == (10, 10)
    assert optimizer.gradients[0][0].tolist() == exactly([3.0])


class Backwards:
    """A runner that goes through the micro-batches from the last to the first."""

    def run(self, micro_batches, forward, backward):
        for micro in reversed(list(micro_batches)):
            backward(forward(micro))


def test_the_order_of_micro_batches_is_free():
    seen = []

    def loss(model, rows):
        seen.append(rows[0].item())
        return summed(model, rows)

    model = Slope()
    optimizer = Recorder(model.parameters())
    accumulator = ga.Accumulator(
        model=model,
        update=Update(optimizers=(optimizer,)),
        loss=loss,
        feed=Feed(),
        sizing=Told(FixedCut(size=1)),
        runner=Backwards(),
    )
    accumulator.step(tokens(1.0, 2.0, 6.0))
    assert seen == [6.0, 2.0, 1.0]
    assert optimizer.gradients[0][0].tolist() == exactly([3.0])
