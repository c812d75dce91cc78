"""Lightning Fabric, as its page on gradient accumulation says."""

from lightning.fabric import Fabric

from benchmarks.uneven_text.setting import MAX_GRAD_NORM, Job


def fabric(job: Job) -> None:
    """Train with ``no_backward_sync``.

    The loss is divided by the accumulation steps, which the page leaves to the reader; so the
    gradient is a mean over micro-batches of means over tokens.

    https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html
    """
    steps = job.setting.accumulation_steps
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(job.model, job.optimizer)
    loader = fabric.setup_dataloaders(job.loader())
    for iteration, micro in enumerate(loader, start=1):
        is_accumulating = iteration % steps != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(model(**micro).loss / steps)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
