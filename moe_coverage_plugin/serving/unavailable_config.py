"""The quantization config that is registered if the serving half does not fit the installed release of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError


class UnavailableConfig(QuantizationConfig):
    """Stops at checkpoints that have our entry and claims no others; never instantiated.

    Attributes:
        message: what the error says.
    """

    message: ClassVar[str] = ""

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Stop at a checkpoint that has our entry; vLLM calls this in the user's process for every quantized model.

        Args:
            hf_quant_cfg: the checkpoint's ``quantization_config``.

        Raises:
            CoverageError: it has our entry.
        """
        if CONFIG_KEY in hf_quant_cfg:
            raise CoverageError(cls.message)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NoReturn:  # noqa: ARG003  # vLLM's signature
        """Stop if our name was given as ``--quantization``.

        Raises:
            CoverageError: always.
        """
        raise CoverageError(cls.message)
