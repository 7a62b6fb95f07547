"""The grouped forward of a layer's experts, shared by calibration and recovery.

The toolkit runs experts one after the other, each over its tokens. They are many and small, so on a device the calls
cost more than the arithmetic, and hooks on every projection would cost as much again. Here the routed rows are sorted
by expert, and each projection of all experts is one call (:data:`Projection`): plain linear layers in calibration,
adapted and padded ones in :mod:`~moe_coverage_plugin.recovery.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import get_execution_device, get_offloaded_device
from compressed_tensors.utils import align_module_device
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import grouped_mm, linear, pad

from moe_coverage_plugin.core.products import SIXTEEN_BITS, tf32_products, wide_product
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width, projections
from moe_coverage_plugin.modeling.routing import Routing

# grouped products require rows of a multiple of 16 bytes: 8 numbers of 16 bits
ALIGNMENT = 8


class ExpertTrace(NamedTuple):
    """The values inside a layer's experts for one batch: one row per token and expert that it is routed to.

    Attributes:
        routing: the order of the rows and their routing weights.
        x_MH: input of the experts.
        gate_MI: output of ``gate_proj``; ``None`` if the experts have none.
        up_MI: output of ``up_proj``.
        a_MI: the activation, input of ``down_proj``.
        z_MH: output of the experts, before the routing weight.
    """

    routing: Routing
    x_MH: Tensor
    gate_MI: Tensor | None
    up_MI: Tensor
    a_MI: Tensor
    z_MH: Tensor


Observe = Callable[[ExpertTrace], None]
# from the number of tokens of the current batch to the mask ``[T]`` of those that are not padding; ``None``: all
RealTokens = Callable[[int], Tensor | None]
# one projection of all kept experts: from rows ``[M, A]``, sorted by expert, and rows per expert ``[E]`` to ``[M, O]``
Projection = Callable[[Tensor, Tensor], Tensor]


class GroupedExperts:
    """The kept experts of one layer, computed together over the tokens that are routed to them."""

    def __init__(
        self,
        layer: MoELayer,
        project: Callable[[str, list[Any]], Projection],
        observe: Observe | None = None,
        real_tokens: RealTokens | None = None,
    ):
        """Group the projections of the experts that are kept now.

        Args:
            layer: its container must compute as the toolkit's does (:func:`computes_as_toolkit`).
            project: makes a :data:`Projection` from its name (``up_proj``) and the modules of the kept experts.
            observe: called with the values of every batch.
            real_tokens: the mask of each batch; ``None``: no token is padding.
        """
        assert computes_as_toolkit(layer), f"{layer.name}: {type(layer.experts).__name__} has a forward of its own"
        self._container: Any = layer.experts
        self._num_experts = layer.num_experts
        self._observe, self._real_tokens = observe, real_tokens
        kept = [index for index, mlp in enumerate(layer.mlps) if expert_width(mlp)]
        # None: all, which needs no indexing
        self._kept = kept if len(kept) < layer.num_experts else None
        parts = [projections(layer.mlps[index]) for index in kept]
        self._projections = {name: project(name, [part[name] for part in parts]) for name in parts[0]}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute a batch, in place of the container's ``forward``.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: experts of each token, ``[T, K]``; none of them may be removed.
            top_k_weights: their routing weights, ``[T, K]``.

        Returns:
            ``[T, H]``, the weighted sum over the experts of each token.
        """
        tokens = hidden_states.shape[0]
        real_T = None if self._real_tokens is None else self._real_tokens(tokens)
        routing = Routing.of(top_k_index, top_k_weights, self._num_experts, real_T)
        trace = self._trace(hidden_states, routing)
        if self._observe is not None:
            self._observe(trace)
        return _weighted_sum(trace.z_MH, routing, hidden_states)

    def _trace(self, hidden_TH: Tensor, routing: Routing) -> ExpertTrace:
        lengths_E = routing.lengths_E if self._kept is None else routing.lengths_E[self._kept]
        x_MH = routing.rows(hidden_TH)
        gate_MI = self._projections["gate_proj"](x_MH, lengths_E) if "gate_proj" in self._projections else None
        up_MI = self._projections["up_proj"](x_MH, lengths_E)
        if gate_MI is None:
            a_MI = self._container.act_fn(up_MI)
        else:
            a_MI = self._container._apply_gate(torch.cat([gate_MI, up_MI], dim=-1))
        return ExpertTrace(routing, x_MH, gate_MI, up_MI, a_MI, self._projections["down_proj"](a_MI, lengths_E))


def _weighted_sum(z_MH: Tensor, routing: Routing, hidden_TH: Tensor) -> Tensor:
    """The outputs of the experts of each token, times their routing weights, added."""
    weighted_MH = (z_MH * routing.routing_weights_M[:, None]).to(hidden_TH.dtype)
    return routing.over_slots(weighted_MH)


class RaggedExperts:
    """The kept experts of one layer, over sorted rows; they may differ in width."""

    def __init__(self, layer: MoELayer):
        """Take the experts that are kept now; see :class:`GroupedExperts`."""
        self._layer = layer
        self._functions = [
            ExpertFunction(layer, each) if expert_width(mlp) else None for each, mlp in enumerate(layer.mlps)
        ]
        # made for the first batch, and held: a copy of the layer's experts
        self._padded: GroupedExperts | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute a batch, as :meth:`GroupedExperts.forward`."""
        if _in_one_call(hidden_states):
            self._padded = self._padded or GroupedExperts(self._layer, PaddedProjection)
            return self._padded.forward(hidden_states, top_k_index, top_k_weights)
        routing = Routing.of(top_k_index, top_k_weights, len(self._functions), None)
        rows = hidden_states[routing.tokens_M].split(routing.lengths_E.tolist())
        outputs = []
        for function, x_MH in zip(self._functions, rows, strict=True):
            if len(x_MH):
                assert function is not None, "a token is routed to a removed expert"
                with function:
                    outputs.append(function.output(x_MH))
        return _weighted_sum(torch.cat(outputs), routing, hidden_states)


class LinearProjection:
    """One linear layer of every kept expert; all have one shape."""

    def __init__(self, _name: str, linears: list[Linear]):
        """Take the linear layer of each kept expert."""
        self._linears = linears
        # reading an offloaded weight copies it, so only weights that stay on their device are held
        resident = all(get_offloaded_device(each) == get_execution_device(each) for each in linears)
        self._held = self._parameters() if resident else None

    def _parameters(self) -> tuple[list[Tensor], list[Tensor] | None]:
        weights = [each.weight for each in self._linears]
        return weights, None if self._linears[0].bias is None else [each.bias for each in self._linears]

    def __call__(self, x_MA: Tensor, lengths_E: Tensor) -> Tensor:
        """Multiply the rows of each expert by its weight (see :data:`Projection`)."""
        weights, biases = self._held or self._parameters()
        if _in_one_call(x_MA):
            stacked_EO = None if biases is None else torch.stack(biases)
            return _grouped_linear(x_MA, torch.stack(weights), stacked_EO, lengths_E)
        rows = zip(x_MA.split(lengths_E.tolist()), weights, biases or [None] * len(weights), strict=True)
        # a bfloat16 model may compute in float32, see compute_dtype.py
        product = linear if x_MA.dtype == weights[0].dtype else ConvertedLinear.apply
        return torch.cat([product(*row) for row in rows])


class PaddedProjection:
    """One linear layer of every kept expert, with zeros up to the widest one, so that all are multiplied in one call.

    Channels that are added get zero from ``gate_proj`` and ``up_proj``, and ``down_proj`` multiplies what the
    activation makes of that by zero.
    """

    def __init__(self, name: str, linears: list[Linear]):
        """Copy the linear layer of each kept expert to the device on which it computes."""
        down = name == "down_proj"
        width = max(each.in_features if down else each.out_features for each in linears)
        width = -(-width // ALIGNMENT) * ALIGNMENT
        weights, biases = [], []
        for each in linears:
            # read once, because each read of an offloaded parameter copies it
            weight_OA, bias_O = each.weight.detach(), each.bias
            missing = width - weight_OA.shape[int(down)]
            weights.append(_widened(weight_OA, int(down), missing))
            if bias_O is not None:
                biases.append(bias_O.detach() if down else _widened(bias_O.detach(), 0, missing))
        self._weight_EOA = torch.stack(weights)
        self._bias_EO = torch.stack(biases) if biases else None

    def __call__(self, x_MA: Tensor, lengths_E: Tensor) -> Tensor:
        """Multiply the rows of each expert by its weight (see :data:`Projection`)."""
        return _grouped_linear(x_MA, self._weight_EOA, self._bias_EO, lengths_E)


def _widened(tensor: Tensor, dim: int, missing: int) -> Tensor:
    """Add zeros at the end of a dimension."""
    # pad would copy what needs no zeros; it lists dimensions from the last to the first
    return pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing]) if missing else tensor


def _in_one_call(x_MA: Tensor) -> bool:
    """Whether rows of all experts are multiplied by their weights in one call."""
    return x_MA.is_cuda and x_MA.dtype == torch.bfloat16


def _grouped_linear(x_MA: Tensor, weight_EOA: Tensor, bias_EO: Tensor | None, lengths_E: Tensor) -> Tensor:
    y_MO = grouped_mm(x_MA, weight_EOA.transpose(1, 2), offs=lengths_E.cumsum(0, dtype=torch.int32))
    return y_MO if bias_EO is None else y_MO + bias_EO.repeat_interleave(lengths_E, dim=0, output_size=len(y_MO))


class ConvertedLinear(torch.autograd.Function):
    """A linear layer with a weight of another dtype than its input, without gradient of the weight.

    The graph keeps the weight as it is; one converted copy exists at a time.
    """

    @staticmethod
    def forward(ctx: Any, x_MA: Tensor, weight_OA: Tensor, bias_O: Tensor | None) -> Tensor:
        """Compute ``x @ weight.T + bias`` in the dtype of ``x``."""
        ctx.save_for_backward(weight_OA)
        return _converted(x_MA, weight_OA, bias_O)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares any number of gradients
        ctx: Any, grad_MO: Tensor
    ) -> tuple[Tensor, None, None]:
        """Compute the gradient of ``x``."""
        (weight_OA,) = ctx.saved_tensors
        return grad_MO @ weight_OA.to(grad_MO.dtype), None, None


class ExpertFunction:
    """The activation and the projections of one expert, for rows of any number, in the dtype of these rows.

    A context, because the weights of an offloaded expert are on its device only within it.
    """

    def __init__(self, layer: MoELayer, index: int):
        """Take an expert that is not removed.

        Args:
            layer: its container must compute as the toolkit's does (:func:`computes_as_toolkit`).
            index: of the expert.
        """
        assert computes_as_toolkit(layer), f"{layer.name}: {type(layer.experts).__name__} has a forward of its own"
        self._mlp = layer.mlps[index]
        container: Any = layer.experts
        self.projections = projections(self._mlp)
        self.inputs = [self.projections[name] for name in ("gate_proj", "up_proj") if name in self.projections]
        # from the outputs of ``inputs`` side by side, ``[M, 2I]`` or ``[M, I]``, to ``[M, I]``
        self.act: Callable[[Tensor], Tensor] = container._apply_gate if len(self.inputs) == 2 else container.act_fn

    def __enter__(self) -> ExpertFunction:
        self._stack = ExitStack()
        self._stack.enter_context(align_module_device(self._mlp))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def activation(self, x_MH: Tensor) -> Tensor:
        """The input of ``down_proj``, ``[M, I]``."""
        return self.act(torch.cat([_converted(x_MH, each.weight, each.bias) for each in self.inputs], dim=-1))

    def output(self, x_MH: Tensor) -> Tensor:
        """The output of the expert, ``[M, H]``."""
        down = self.projections["down_proj"]
        return _converted(self.activation(x_MH), down.weight, down.bias)

    def wide_output(self, x_MH: Tensor) -> Tensor:
        """The output without the bias of ``down_proj``, in float32 or wider, so that it is not rounded to 16 bits.

        On a GPU, activations of rows in 16 bits are multiplied in TF32, which rounds them less.
        """
        h_MO = torch.cat([_wide(x_MH, each.weight, each.bias) for each in self.inputs], dim=-1)
        with tf32_products(x_MH.dtype in SIXTEEN_BITS):
            return _wide(self.act(h_MO), self.projections["down_proj"].weight, None)


def activations(layer: MoELayer, experts: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
    """The input of ``down_proj`` of some experts of one width, each for rows of its own.

    Args:
        layer: its container must compute as the toolkit's does (:func:`computes_as_toolkit`).
        experts: their indices; none of them removed.
        rows: inputs ``[M, H]`` of each.
    """
    functions = [ExpertFunction(layer, each) for each in experts]
    if not (_in_one_call(rows[0]) and any(map(len, rows))):
        found = []
        for function, x_MH in zip(functions, rows, strict=True):
            with function:
                found.append(function.activation(x_MH))
        return found
    x_MH, lengths = torch.cat(list(rows)), [len(each) for each in rows]
    lengths_D = torch.tensor(lengths, device=x_MH.device)
    inputs = zip(*(function.inputs for function in functions), strict=True)
    outputs = [LinearProjection("", list(linears))(x_MH, lengths_D) for linears in inputs]
    return list(functions[0].act(torch.cat(outputs, dim=-1)).split(lengths))


def down_weights(layer: MoELayer, experts: Sequence[int]) -> Tensor:
    """Copy ``down_proj`` of some experts of one width, ``[D, H, I]``."""
    weights = []
    for index in experts:
        with ExpertFunction(layer, index) as function:
            # an offloaded weight is on its device only within the context
            weights.append(function.projections["down_proj"].weight.detach().clone())
    return torch.stack(weights)


def _wide(x_MA: Tensor, weight_OA: Tensor, bias_O: Tensor | None) -> Tensor:
    y_MO = wide_product(x_MA, weight_OA.T)
    return y_MO if bias_O is None else y_MO + bias_O


def _converted(x_MA: Tensor, weight_OA: Tensor, bias_O: Tensor | None) -> Tensor:
    return linear(x_MA, weight_OA.to(x_MA.dtype), None if bias_O is None else bias_O.to(x_MA.dtype))


def computes_as_toolkit(layer: MoELayer) -> bool:
    """Whether the experts compute as the toolkit's container does, not by a ``forward`` of their family."""
    return type(layer.experts).forward is LinearExperts2D.forward


@contextmanager
def grouped_experts(layer: MoELayer, observe: Observe | None, real_tokens: RealTokens) -> Iterator[None]:
    """Let ``layer`` compute its experts together, over routed tokens only, and show their values to ``observe``.

    The kept experts must have one width. Hooks on modules inside the experts do not run.

    Args:
        layer: computed as before after the context.
        observe: called for every batch.
        real_tokens: the mask of each batch.
    """
    experts = GroupedExperts(layer, LinearProjection, observe, real_tokens)
    # patch: grouped-experts
    with replaced_forward(layer.experts, experts.forward):
        yield


@contextmanager
def replaced_forward(module: Module, forward: Callable[..., object]) -> Iterator[None]:
    """Replace ``module.forward`` and restore it, so that copies of the module made later have their own."""
    # only an offloaded module has one beside that of its class
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
