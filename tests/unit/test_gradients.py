import torch
from torch import nn

from gradaccum.gradients import Gradients


def test_only_the_optimizers_parameters_get_sums():
    mine, other = nn.Linear(2, 1), nn.Linear(1, 1)
    gradients = Gradients([torch.optim.SGD(mine.parameters(), lr=1.0)])
    other.weight.grad = torch.ones(1, 1)
    gradients.clear()
    for _ in range(3):
        gradients.add(other(mine(torch.ones(1, 2))).sum())
    assert torch.allclose(mine.bias.grad, 3 * other.weight[0])
    assert other.weight.grad.item() == 1.0
    assert other.bias.grad is None
    assert len(gradients.tensors()) == 2
    assert torch.allclose(
        gradients.norm(), torch.cat([mine.weight.grad.flatten(), mine.bias.grad]).norm()
    )


def test_parameter_groups_are_read_anew():
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    gradients = Gradients([optimizer])
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model[0].bias.requires_grad_(False)
    model[1].bias.grad = torch.ones(1)
    gradients.clear()
    assert model[1].bias.grad is None
    gradients.add(sum(part(torch.ones(1, 2)).sum() for part in model))
    assert len(gradients.tensors()) == 3
    assert model[0].bias.grad is None


def test_no_sum_has_no_norm():
    assert Gradients([]).norm().item() == 0.0
