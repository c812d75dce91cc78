import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from gradaccum.errors import PhaseError
from gradaccum.gradients import Gradients


def test_only_the_optimizers_parameters_get_sums():
    mine, other = nn.Linear(2, 1), nn.Linear(1, 1)
    gradients = Gradients(mine, [torch.optim.SGD(mine.parameters(), lr=1.0)])
    other.weight.grad = torch.ones(1, 1)
    gradients.clear()
    for _ in range(3):
        gradients.add(other(mine(torch.ones(1, 2))).sum())
    assert torch.allclose(mine.bias.grad, 3 * other.weight[0])
    assert other.weight.grad.item() == 1.0
    assert other.bias.grad is None
    assert len(gradients.tensors()[0]) == 2
    assert torch.allclose(
        get_total_norm(gradients.tensors()[0]),
        torch.cat([mine.weight.grad.flatten(), mine.bias.grad]).norm(),
    )


def test_parameter_groups_are_read_anew():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    gradients = Gradients(model, [optimizer])
    gradients.clear()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model[0].bias.requires_grad_(False)
    model[1].bias.grad = torch.ones(1)
    gradients.clear()
    assert model[1].bias.grad is None
    gradients.add(sum(part(torch.ones(1, 2)).sum() for part in model))
    assert [len(group) for group in gradients.tensors()] == [1, 2]
    assert model[0].bias.grad is None


def test_a_later_micro_batch_may_reach_others():
    mine, other = nn.Linear(2, 1), nn.Linear(1, 1)
    gradients = Gradients(mine, [torch.optim.SGD(mine.parameters(), lr=1.0)])
    gradients.clear()
    for _ in range(4):  # by now a graph of as many nodes is not searched again
        gradients.add(mine(torch.ones(1, 2)).sum())
    gradients.add(other(mine(torch.ones(1, 2))).sum())
    assert other.weight.grad is None
    assert torch.allclose(mine.bias.grad, 4 + other.weight[0])


def test_a_parameter_that_is_given_up_is_another_s():
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    gradients = Gradients(layer, [optimizer])
    for _ in range(4):
        gradients.clear()
        gradients.add(layer(torch.ones(1, 2)).sum())
    optimizer.param_groups[0]["params"].pop()
    layer.bias.grad = None
    gradients.clear()
    gradients.add(layer(torch.ones(1, 2)).sum())
    assert layer.bias.grad is None
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.zero_grad(),
        lambda layer: [p.grad.mul_(0.5) for p in layer.parameters()],
        lambda layer: layer(torch.ones(1, 2)).sum().backward(),
    ],
    ids=["zero_grad", "rescaled", "another backward"],
)
def test_changes_from_outside_are_noticed(change):
    layer = nn.Linear(2, 1)
    gradients = Gradients(layer, [torch.optim.SGD(layer.parameters(), lr=1.0)])
    gradients.clear()
    gradients.add(layer(torch.ones(1, 2)).sum())
    gradients.add(layer(torch.ones(1, 2)).sum())
    change(layer)
    with pytest.raises(PhaseError, match="another backward, zero_grad or scaling"):
        gradients.add(layer(torch.ones(1, 2)).sum())


def test_a_loss_that_is_a_parameter_itself():
    mine, other = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    gradients = Gradients(nn.ParameterList([mine]), [torch.optim.SGD([mine], lr=1.0)])
    gradients.clear()
    gradients.add(mine)
    gradients.add(other)
    assert mine.grad == 1.0
    assert other.grad is None


def test_micro_batches_that_reach_other_parts_of_the_model_with_as_many_nodes():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    gradients = Gradients(model, [torch.optim.SGD(model[0].parameters(), lr=1.0)])
    gradients.clear()
    for part in (0, 0, 0, 1):
        gradients.add(model[part](torch.ones(1, 2)).sum())
    assert model[0].bias.grad == 3.0
    assert model[1].bias.grad is None


def test_a_reentrant_checkpoint_is_refused_beside_parameters_of_others():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    gradients = Gradients(model, [torch.optim.SGD(model[0].parameters(), lr=1.0)])
    gradients.clear()
    inputs = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(PhaseError, match="use_reentrant=False"):
        gradients.add(checkpoint(model, inputs, use_reentrant=True).sum())
    assert model[1].bias.grad is None
    model[1].requires_grad_(False)
    gradients.clear()
    gradients.add(checkpoint(model, inputs, use_reentrant=True).sum())
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_in_the_middle_is_noticed(foreach):
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, foreach=foreach)
    gradients = Gradients(layer, [optimizer])
    gradients.clear()
    gradients.add(layer(torch.ones(1, 2)).sum())
    optimizer.step()
    with pytest.raises(PhaseError, match=r"an optimizer\.step\(\)"):
        gradients.add(layer(torch.ones(1, 2)).sum())


def test_sparse_sums_are_scaled_through_their_values():
    table = nn.Embedding(5, 2, sparse=True)
    gradients = Gradients(table, [torch.optim.SGD(table.parameters(), lr=1.0)])
    gradients.clear()
    gradients.add(table(torch.tensor([1, 1, 3])).sum())
    gradients.add(table(torch.tensor([3, 1])).sum() * 2)
    ((values,),) = gradients.tensors()
    assert values.tolist() == [[4.0, 4.0], [3.0, 3.0]]
    assert torch.equal(values.norm(), table.weight.grad.to_dense().norm())
    values.mul_(0.5)
    assert table.weight.grad.to_dense()[3].tolist() == [1.5, 1.5]
