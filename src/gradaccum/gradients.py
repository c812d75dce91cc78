"""Where gradient sums live, and in which dtype: in ``.grad``, added in place by autograd."""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gradaccum.dtypes import narrower_than
from gradaccum.errors import PhaseError
from gradaccum.step_in_backward import hooked, refuse_steps


class Gradients:
    """The gradient sums of the parameters that some optimizers hold. Nothing is scaled here.

    Only these parameters receive gradients: a generator's pass through its discriminator leaves
    the discriminator's sums alone. Autograd can be told so (``inputs=``), which costs 4 % of a
    small backward pass. So it is told where the model has trainable parameters that no optimizer
    here holds. Else a loss can reach others only from outside the model, as when it closes over
    a second one: the graph of a micro-batch is then searched for them, and a graph of as many
    nodes as the one before is not searched again.

    One sum and its parameter are watched for changes from outside; they stand for all, since
    another backward, `zero_grad`, a rescaling or an `optimizer.step()` changes them too. (Fused
    kernels of torch 2.13 do not count their changes, so a fused optimizer's step goes unnoticed.)

    A sum of 16 bits stops growing where what is added is less than half of its last place: 1.0 and
    a thousand times 0.001 are 1.0 in bfloat16. So sums are wider than such parameters, by
    ``Tensor.grad_dtype``, for as long as they are held.

    Args:
        model: Its parameters.
        optimizers: Their parameter groups are read anew for each effective batch, so parameters
            that were added or unfrozen in between take part.
        dtype: The least of a sum; wider parameters have sums of their own dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model, self._optimizers, self._dtype = model, tuple(optimizers), dtype
        self._narrower = narrower_than(dtype)
        self._parameters: list[Parameter] = []
        self._wide: list[tuple[Parameter, torch.dtype | None]] = []  # and what theirs was before
        self._ids: list[int] = []
        self._compiled = False  # some of the model, whose gradients may be buffers of CUDA graphs
        self._owned: set[int] = set()  # ids of the parameters whose sums were copied out of those
        self._sparse: list[Parameter] | None = None  # whose sums are; None before they are known
        self._hooked: list[Parameter] = []  # whose hooks were not looked at yet
        self._others: list[Parameter] = []  # parameters of the model beside these
        self._shared = False  # some of those are trainable
        self._alone = True  # no other's parameter is in reach of the graph that was searched last
        self._last_node = self._nodes = 0  # number of its last node, and how many it has
        # A parameter and its sum after the last micro-batch, and how often each was changed in
        # place by then.
        self._watched: tuple[Parameter, Tensor, int, int] | None = None

    def clear(self) -> None:
        """Free the sums of every parameter, and note which parameters want one."""
        self._forget()
        held = [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        for parameter in held:
            parameter.grad = None
        self._parameters = [p for p in held if p.requires_grad]
        for parameter in self._parameters:
            if parameter.dtype in self._narrower:
                self._wide.append((parameter, parameter.grad_dtype))
                parameter.grad_dtype = self._dtype
        ids = list(map(id, self._parameters))
        if ids != self._ids:
            self._ids, self._nodes = ids, 0
            self._hooked = hooked(self._parameters)
            self._compiled = any(map(_is_compiled, self._model.modules()))
            own = set(ids)
            self._others = [p for p in self._model.parameters() if id(p) not in own]
        self._shared = any(p.requires_grad for p in self._others)

    def free(self) -> None:
        """Free the sums."""
        for parameter in self._parameters:
            parameter.grad = None
        self._forget()

    def _forget(self) -> None:
        """Put back what gradients may be, and note nothing of an effective batch."""
        for parameter, before in self._wide:
            parameter.grad = None
            parameter.grad_dtype = before
        self._wide, self._watched, self._sparse = [], None, None
        self._owned.clear()

    @property
    def wide(self) -> bool:
        """Whether some sums have another dtype than their parameters, as no optimizer takes it."""
        return bool(self._wide)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The parameters that want a sum."""
        return self._parameters

    def narrow(self) -> None:
        """Round the sums to the dtypes of their parameters, each once."""
        self._watched = None  # which holds a wide one
        for parameter, before in self._wide:
            if (total := parameter.grad) is not None:
                parameter.grad = None
                parameter.grad_dtype = before
                parameter.grad = total.to(parameter.dtype)

    def add(self, total: Tensor) -> None:
        """Add the gradient of a summed loss. Its graph is freed.

        Args:
            total: 0-dimensional tensor.
        """
        self.check()
        inputs = None if self._is_alone(total) else self._parameters
        if self._hooked:
            refuse_steps(self._hooked, partial(torch.autograd.backward, total, inputs=inputs))
            self._hooked = []
        else:
            torch.autograd.backward(total, inputs=inputs)
        self._settle()
        watched = self._parameters if self._watched is None else self._watched[:1]
        one = next((p for p in watched if p.grad is not None), None)
        if one is not None and one.grad is not None:
            self._watched = one, one.grad, one.grad._version, one._version

    def _settle(self) -> None:
        """Make what autograd has left in ``.grad`` into sums that can be added to."""
        if self._sparse is None:
            self._sparse = [p for p in self._parameters if p.grad is not None and p.grad.is_sparse]
        for parameter in self._sparse:  # else the rows of all micro-batches would be kept
            if parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce()
        for parameter in self._parameters if self._compiled else ():
            if parameter.grad is not None and id(parameter) not in self._owned:
                # Autograd takes a first gradient as it is: of a CUDA graph it is a buffer that the
                # next replay overwrites.
                parameter.grad = parameter.grad.clone()
                self._owned.add(id(parameter))

    def check(self) -> None:
        """Refuse sums that someone else changed since the last micro-batch.

        Raises:
            PhaseError: They were.
        """
        if self._watched is None:
            changed = any(p.grad is not None for p in self._parameters)
        else:
            one, total, version, moved = self._watched
            changed = one.grad is not total or total._version != version
            if one._version != moved:
                raise PhaseError(
                    "parameters in the middle of an effective batch",
                    expected="no change before all its micro-batches are in",
                    got="an optimizer.step(), or another change in place",
                    remedy="Leave optimizer.step() and zero_grad() out; the accumulator steps.",
                )
        if changed:
            raise PhaseError(
                "gradient sums in the middle of an effective batch",
                expected="no change from outside",
                got="another backward, zero_grad or scaling of these parameters' .grad",
                remedy="Give each loss to the accumulator; it divides, clips and clears.",
            )

    def tensors(self) -> list[list[Tensor]]:
        """Return the sums that exist; a parameter that no loss has reached has none.

        Returns:
            For each parameter group of the optimizers, dense tensors that share memory with the
            sums: of a sparse one, whose rows are added up here, the values.
        """
        groups = [group["params"] for o in self._optimizers for group in o.param_groups]
        return [[_dense(p, p.grad) for p in held if p.grad is not None] for held in groups]

    def _is_alone(self, total: Tensor) -> bool:
        """Return whether a graph reaches none but these parameters.

        Autograd numbers its nodes as they are made, so the distance between the last nodes of two
        micro-batches is the number of nodes of the second. While it stays the same the model
        took the same way, and the answer stands.
        """
        if total.grad_fn is None:  # the loss is a parameter itself
            return False
        number: int = total.grad_fn._sequence_nr()
        nodes, self._last_node = number - self._last_node, number
        if nodes != self._nodes:
            self._nodes = nodes
            self._alone = not _reaches_others(total, set(self._ids), shared=self._shared)
        return self._alone and not self._shared


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made a module, or compiled its calls."""
    called = getattr(module, "_compiled_call_impl", None)
    return called is not None or type(module).__name__ == "OptimizedModule"


def _dense(parameter: Parameter, total: Tensor) -> Tensor:
    if total.is_sparse:
        parameter.grad = total = total.coalesce()
        total = total.values()
    return total


def _reaches_others(total: Tensor, own: Collection[int], *, shared: bool) -> bool:
    """Return whether the graph of a loss has parameters that are not among these, by their ids.

    Raises:
        PhaseError: A reentrant checkpoint hides what it reaches, and the model is `shared`.
    """
    waiting = [total.grad_fn]
    seen = set(waiting)
    others = reentrant = False
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            leaf = getattr(following, "variable", None)  # of autograd's AccumulateGrad
            if leaf is None:
                waiting.append(following)
                reentrant = reentrant or following.name() == "CheckpointFunctionBackward"
            elif id(leaf) not in own:  # inputs that want a gradient are nobody's sums
                others = others or isinstance(leaf, Parameter)
    if (others or shared) and reentrant:
        raise PhaseError(
            "backward through torch.utils.checkpoint(..., use_reentrant=True)",
            expected="a graph that shows which parameters it reaches",
            got="a reentrant checkpoint, which hides them, beside parameters of others",
            remedy="Checkpoint with use_reentrant=False, or freeze what is not trained here.",
        )
    return others
