"""Options of the four modifiers; the defaults are the recommended method.

Sources name the paper, "Attribution-Guided and Coverage-Maximized Pruning for Structural MoE Compression"
(arXiv 2606.18304). The recipes ``coverage_*`` write the settings of the paper out.
"""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.options.base import Options

ClosedFormMetric = Literal["activation", "weight", "weight_activation"]
GradientMetric = Literal["gradient", "activation_gradient", "snip", "fisher", "obs"]
ChannelMetric = Literal[ClosedFormMetric, GradientMetric]
ClosedFormImportance = Literal["first_order", "second_order"]
NllImportance = Literal["nll_signed", "nll_absolute", "nll_squared"]
ExpertImportance = Literal[ClosedFormImportance, NllImportance]
GRADIENT_METRICS = get_args(GradientMetric)
NLL_IMPORTANCES = get_args(NllImportance)

Scope = Literal["layers", "global"]
InterLayer = Literal["uniform", "u_shaped", "loss", "coverage"]
IntraLayer = Literal["uniform", "loss", "router_weight", "usage", "topk_channel", "coverage"]
LayerPrior = Literal["loss", "uniform"]
ExpertPrior = Literal["attribution", "loss", "usage", "router_weight", "uniform"]
Smoothing = Literal["none", "sqrt", "log", "huber", "clip"]

AlignmentStrategy = Literal["hamilton", "blocks"]
RemainderRule = Literal["l-r-c", "l-r-s"]

Refit = Literal["all", "down"]

Labels = Literal["text", "model"]


class AttributionOptions(Options):
    """What is measured on the calibration data."""

    channel_metric: ChannelMetric = "obs"
    """Score of a channel.

    From one forward pass: ``activation`` (L2 norm of the channel over the tokens of its expert; the paper's default),
    ``weight`` (L2 norms of its weights), ``weight_activation`` (weights times the norms of their inputs).
    From one pass forward and backward: ``fisher`` (``sum_t (A dNLL/dA)^2``, comparable between layers), ``obs`` (the
    same if the other channels take over, for ``reconstruct: true``; one more forward pass; see ``core/obs.py``), and
    ``gradient``, ``activation_gradient`` and ``snip`` (paper, appendix C.3.1; see ``core/gradients.py``).
    """

    expert_importance: ExpertImportance = "first_order"
    """Measure of an expert's importance, which expert_prior attribution uses.

    In closed form, at no extra cost: ``first_order`` (the paper's attribution) or ``second_order`` (the exact loss of
    removing the expert). From gradients, with ``u_t = <dNLL/dz_t, z_t>``: ``nll_signed`` (``-sum_t u_t``),
    ``nll_absolute`` (``sum_t |u_t|``) or ``nll_squared`` (``sum_t u_t^2``).
    """

    labels: Labels = "text"
    """Next tokens whose loss is differentiated.

    ``text``: those of the calibration text (empirical Fisher). ``model``: drawn from the model's prediction at every
    position (true Fisher), for text that the model would not write. Its own text has drawn tokens already.
    """

    layer_noise: float | None = Field(default=None, gt=0, le=1)
    """Fraction by which the output of a layer fades when the importance of the layer is measured.

    The paper removes the output, 1.0. ``None``: not measured.
    """

    layer_batches: int = Field(default=16, ge=1)
    """Number of calibration batches, on each rank, that measure the layers."""

    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average over batches, as in the code of the paper.

    ``None``: plain sums.
    """

    ignore: list[str] = Field(default_factory=list)
    """Names, classes or ``re:`` patterns of MoE layers to leave unpruned, or of modules around them."""

    scores: str | None = None
    """Score file of an earlier run on the same model, to use instead of measuring.

    Its contents take precedence over the fields that say what to measure.
    """

    save_scores: str | None = None
    """File to write the scores to as soon as they are measured.

    Every checkpoint also has a copy of them.
    """

    @property
    def uses_gradients(self) -> bool:
        """Whether a pass forward and backward is needed."""
        return self.channel_metric in GRADIENT_METRICS or self.expert_importance in NLL_IMPORTANCES

    @model_validator(mode="after")
    def _check_attribution(self) -> Self:
        if not self.uses_gradients and self.labels != "text":
            raise CoverageError(
                f"labels={self.labels!r} would do nothing with {self.spell('channel_metric', self.channel_metric)}, "
                "which needs no loss: leave it out, or choose channel_metric='obs'"
            )
        if self.ema is not None and self.uses_gradients:
            by_gradients = "channel_metric" if self.channel_metric in GRADIENT_METRICS else "expert_importance"
            raise CoverageError(
                f"ema={self.ema} does not average gradients, which "
                f"{self.spell(by_gradients, getattr(self, by_gradients))} needs: leave ema out, or choose "
                "channel_metric='activation' and expert_importance='first_order'"
            )
        return self


class CoverageOptions(Options):
    """How a budget of channels becomes the widths of experts."""

    sparsity: float = Field(ge=0, lt=1)
    """Fraction of the expert channels to remove.

    Layers in ``ignore`` of AttributionModifier do not count.
    """

    scope: Scope = "global"
    """Whether the experts of all layers share one budget, or layers share it first.

    ``global``: one budget for the experts of all layers, by ``intra_layer``: with ``topk_channel`` the best channels
    of the model, ``sum_le S_le(N_le)`` at its largest, which needs scores that are comparable between layers, such as
    ``fisher``. ``layers`` (paper, CBA): the budget is shared among layers first, then among the experts of each.
    """

    inter_layer: InterLayer = "coverage"
    """Budgets of layers, for scope layers only.

    ``coverage`` (paper), ``uniform``, ``u_shaped`` (more at both ends of the model) or ``loss`` (in proportion to the
    importance of the layer).
    """

    intra_layer: IntraLayer = "topk_channel"
    """Widths of the experts of a layer, or of the model with scope global.

    ``topk_channel`` (the best channels, whichever expert they belong to), ``coverage`` (paper), ``uniform``, or in
    proportion to ``loss``, ``router_weight`` or ``usage`` (routed tokens).
    """

    layer_prior: LayerPrior = "loss"
    """Importance of layers in their coverage, for scope layers only.

    ``loss`` (measured by AttributionModifier with ``layer_noise``) or ``uniform``.
    """

    expert_prior: ExpertPrior = "attribution"
    """Importance of experts in their coverage, for intra_layer coverage only.

    ``attribution`` (AttributionModifier's ``expert_importance``; paper), ``loss`` (exact loss of removing the
    expert), ``usage`` (routed tokens), ``router_weight`` or ``uniform``.
    """

    smoothing: Smoothing = "sqrt"
    """Smoothing of the importance of layers, for scope layers only.

    Paper, appendix C.3.3; formulas: ``core/smoothing.py``. The importance of experts is smoothed by its square root.
    """

    @property
    def uses_layer_loss(self) -> bool:
        """Whether the loss of fading layers is needed."""
        if self.scope == "global":
            return False
        return self.inter_layer == "loss" or (self.inter_layer == "coverage" and self.layer_prior == "loss")

    @property
    def uses_attribution(self) -> bool:
        """Whether ``expert_importance`` of AttributionModifier is needed."""
        return self.intra_layer == "coverage" and self.expert_prior == "attribution"

    @model_validator(mode="after")
    def _check_coverage(self) -> Self:
        self.refuse_idle("scope", "layers", "inter_layer", "layer_prior", "smoothing")
        if "intra_layer" not in self.model_fields_set:
            self.refuse_idle("intra_layer", "coverage", "expert_prior")
        return self


class AlignmentOptions(Options):
    """How widths become multiples of a block size."""

    block_size: int = Field(default=128, ge=1)
    """Channels that each width becomes a multiple of.

    ``a`` in the paper. It must divide the width of an unpruned expert, and a quantization group must divide it.
    """

    strategy: AlignmentStrategy = "blocks"
    """Whether to take the best blocks within the budget, or to round the planned widths.

    ``blocks`` takes the widths ``N_le in {0, a, 2a, ...}`` of largest ``sum_le S_le(N_le)``, where ``S_le(n)`` is the
    score of the ``n`` best channels of an expert, within the budget of each layer, or of the model with
    ``scope: global``, and leaves each router as many experts as it needs. ``hamilton`` (paper, AAR) removes experts
    below ``min_width``, floors the other widths to multiples of ``a``, and gives the freed blocks of a layer to its
    largest remainders, at most one each.
    """

    min_width: int = Field(default=128, ge=0)
    """Channels below which an expert is removed, for strategy hamilton only.

    ``m`` in the paper; 0: no expert is removed for its width.
    """

    rule: RemainderRule = "l-r-c"
    """Order of remainders, for strategy hamilton only: channels (l-r-c) or removed score (l-r-s)."""

    @model_validator(mode="after")
    def _check_alignment(self) -> Self:
        self.refuse_idle("strategy", "hamilton", "min_width", "rule")
        if self.strategy == "hamilton":
            check_min_width(self.block_size, self.min_width)
        return self


class ChannelPruningOptions(Options):
    """How channels are removed and experts are stored."""

    layout: Layout = "ragged"
    """Storage of experts.

    ``ragged``: every expert at its own width. ``padded``: zero channels up to the widest expert, which stock engines
    load, at no saving. ``uniform``: all experts at the average width of the budget, with their best channels, which
    stock engines load and which saves memory. The latter two remove no expert and need all layers pruned, because the
    router of a stock engine cannot be masked and one width holds for the whole model.
    """

    reconstruct: bool = True
    """Whether to fit the kept channels of each expert to the output of the unpruned expert.

    Layer by layer over the calibration data, so that later layers are fitted to the output of earlier ones. Every
    fourth sample is held back from the fits; an expert whose held-back tokens are no better with its fit keeps its
    weights.
    """

    refit: Refit = "all"
    """Projections that reconstruct fits.

    ``down``: ``min sum_t g^2 ||W A_t - W' A_tk||^2 + lambda ||W' - W_k||^2`` for ``down_proj``, with ``lambda`` chosen
    by held-back tokens. ``all``: then a Gauss-Newton step for ``gate_proj`` and ``up_proj``, and ``down_proj`` again
    (``core/refit.py``), which takes several times as long.
    """

    pictures: bool = True
    """Whether to draw the plan into a folder of the checkpoint."""

    @model_validator(mode="after")
    def _check_pruning(self) -> Self:
        self.refuse_idle("reconstruct", True, "refit")
        return self


def check_min_width(block_size: int, min_width: int) -> None:
    """Check that rounding to blocks leaves no kept expert below the minimum width.

    Args:
        block_size: channels of a block.
        min_width: channels below which experts are removed.

    Raises:
        CoverageError: names the nearest values that are possible.
    """
    if min_width < 0 or (min_width > block_size and min_width % block_size):
        above = min_width + -min_width % block_size
        raise CoverageError(
            f"minimum width {min_width} is neither between 0 and the block size {block_size} nor a multiple of it, so "
            f"aligned experts could end below it: choose {max(above - block_size, 0)} or {max(above, block_size)}"
        )
