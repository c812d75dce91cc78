"""Loss functions that hand back a sum and its weight, named as in `torch.nn.functional`."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

from gradaccum.dtypes import narrower_than
from gradaccum.errors import LossError
from gradaccum.loss.value import Loss, summed

Per = Literal["token", "sequence"]

# Labels that the head runs over at a time. Of 64, 256 and torch's own choice, the fastest on two
# CPU cores with a vocabulary of 32,000: 0.76, 0.58 and 2.48 s a step, and 0.91 s in one piece.
_CHUNK = 256


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    per: Per = "token",
) -> Loss:
    """Return the cross-entropy of classes along the last dimension.

    For a classifier, a token tagger or a masked language model alike: the weight is the number
    of labels that are not ignored.

    Args:
        logits: ``(..., classes)``; losses of 16 bits are summed in float32.
        labels: ``(...)`` class indices.
        ignore_index: Label that carries no loss and no weight.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        per: What the mean runs over. ``"token"``: every label counts the same. ``"sequence"``:
            every sample (first dimension) counts the same, its labels being averaged first; a
            sample without a label has no weight. For a constant in place of a count, give each
            sample the constant: ``Loss(loss.sum, weight=constant * len(labels))``.

    Returns:
        The summed loss and the number of labels, or of sequences.

    Raises:
        LossError: The shapes do not fit each other.
    """
    if logits.shape[:-1] != labels.shape:
        raise LossError(
            "losses.cross_entropy(logits, labels)",
            expected="labels of the shape of the logits without their last dimension, the classes",
            got=f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}",
            remedy="Move the classes to the last dimension: logits.movedim(1, -1).",
        )
    flat, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if per == "token":
        if flat.dtype in narrower_than(torch.float32):
            total = summed(functional.cross_entropy(flat, targets, reduction="none", **options))
        else:
            total = functional.cross_entropy(flat, targets, reduction="sum", **options)
        return Loss(total, (labels != ignore_index).sum())
    if per != "sequence":
        raise LossError(
            f"losses.cross_entropy(per={per!r})",
            expected='"token" or "sequence"',
            got=repr(per),
            remedy="Say what the mean runs over.",
        )
    values = functional.cross_entropy(flat, targets, reduction="none", **options)
    counts = (labels != ignore_index).reshape(len(labels), -1).sum(1)
    means = summed(values.view(len(labels), -1), 1) / counts.clamp(min=1)
    return Loss(means.sum(), (counts > 0).sum())


def causal_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    per: Per = "token",
) -> Loss:
    """Return the next-token cross-entropy of a causal language model.

    Position ``t`` predicts label ``t + 1``, so a row of five labels has weight four. The labels
    are shifted, not the logits: shifted logits would be a copy of the largest tensor there is.

    Args:
        logits: ``(batch, length, vocabulary)``, not shifted.
        labels: ``(batch, length)`` token ids, not shifted.
        ignore_index: Label that carries no loss and no weight.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        per: ``"token"`` or ``"sequence"``, as in `cross_entropy`.

    Returns:
        The summed loss and the number of predicted labels, or of sequences.
    """
    return cross_entropy(
        logits,
        _following(labels, ignore_index),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        per=per,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Loss:
    """Return the cross-entropy of a linear head, without ever holding all its logits.

    The head runs over 256 labels at a time, forward and backward
    (`torch.nn.functional.linear_cross_entropy`): the same loss, to rounding. With a vocabulary of
    32,000 and 2,000 tokens of 128 dimensions a step needs 144 MiB in place of 844 MiB, and on two
    CPU cores two thirds of the time. Of 16-bit hidden states the sum has 16 bits as well, so the
    loss that is reported is rounded more coarsely than by `cross_entropy`; the gradient is not.

    Args:
        hidden: ``(..., dim)``, what the head would be called with.
        weight: ``(classes, dim)``, of the head.
        labels: ``(...)`` class indices.
        bias: ``(classes,)``, of the head.
        ignore_index: Label that carries no loss and no weight.

    Returns:
        The summed loss and the number of labels.

    Raises:
        LossError: The shapes do not fit each other.
    """
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise LossError(
            "losses.linear_cross_entropy(hidden, weight, labels)",
            expected="hidden (..., dim), weight (classes, dim) and labels (...)",
            got=f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}",
            remedy="Pass what the head is called with, and the head's weight.",
        )
    total = functional.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        linear_bias=bias,
        ignore_index=ignore_index,
        reduction="sum",
        options=LinearCrossEntropyOptions(batch_chunk_size=_CHUNK),
    )
    return Loss(total, (labels != ignore_index).sum())


def causal_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Loss:
    """Return the next-token cross-entropy of a linear head, without ever holding all its logits.

    Args:
        hidden: ``(batch, length, dim)``, what the head would be called with; not shifted.
        weight: ``(vocabulary, dim)``, of the head.
        labels: ``(batch, length)`` token ids, not shifted.
        bias: ``(vocabulary,)``, of the head.
        ignore_index: Label that carries no loss and no weight.

    Returns:
        The summed loss and the number of predicted labels; see `linear_cross_entropy`.
    """
    return linear_cross_entropy(
        hidden,
        weight,
        _following(labels, ignore_index),
        bias=bias,
        ignore_index=ignore_index,
    )


def _following(labels: Tensor, ignore_index: int) -> Tensor:
    """Return for each position the label that it predicts: the next one."""
    following = torch.full_like(labels, ignore_index)
    following[..., :-1] = labels[..., 1:]
    return following


def binary_cross_entropy_with_logits(
    logits: Tensor, targets: Tensor, *, weights: Tensor | None = None
) -> Loss:
    """Return the binary cross-entropy of independent yes-or-no labels.

    Args:
        logits: Of any shape.
        targets: Of the same shape, in [0, 1].
        weights: Of the same shape; by default 1 each.

    Returns:
        The summed loss and the sum of the weights.
    """
    values = functional.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), reduction="none"
    )
    return Loss.of(values, weights)


def mse_loss(output: Tensor, target: Tensor, *, weights: Tensor | None = None) -> Loss:
    """Return the squared error.

    Args:
        output: Of any shape.
        target: Of the same shape.
        weights: Of the same shape; by default 1 each.

    Returns:
        The summed squared error and the sum of the weights.

    Raises:
        LossError: The shapes differ.
    """
    if output.shape != target.shape:
        raise LossError(
            "losses.mse_loss(output, target)",
            expected="one shape, since broadcasting would count errors twice",
            got=f"{tuple(output.shape)} and {tuple(target.shape)}",
            remedy="Reshape the target: target.view_as(output).",
        )
    return Loss.of(functional.mse_loss(output, target, reduction="none"), weights)
