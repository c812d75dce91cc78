"""Keep your own loop: three lines change.

    python examples/own_loop.py

Before, with the usual mistakes: a mean of means where micro-batches carry different weights, a
last effective batch that is too small or is lost, a scheduler that moves too fast.

    for k, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y) / 8
        loss.backward()
        if (k + 1) % 8 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import gradaccum as ga

torch.manual_seed(0)
inputs = torch.randn(500, 16)
data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
loader = DataLoader(data, batch_size=8, shuffle=True)  # 63 micro-batches, the last one of 4
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

accumulator = ga.accumulator(model, optimizer, scheduler=scheduler, max_grad_norm=1.0)
for x, y in accumulator.over(loader, steps=8):
    squares = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
    report = accumulator.backward(squares, weight=len(x))
    if report is not None:  # the effective batch was full, or the loader has ended
        print(
            f"step {report.optimizer_step}: {report.samples} samples in {report.micro_batches} "
            f"micro-batches, loss {report.loss:.4f}, lr {report.lr:.4f}"
        )

assert accumulator.counters.samples == 500
assert scheduler.last_epoch == accumulator.counters.optimizer_steps == 8
