"""The work folder: state from which an interrupted run continues, on a CPU with the same bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn import Parameter
from torch.optim import Optimizer

from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.recovery.curve import Point, write_points

STATE_NAME = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class WorkFolder:
    """Folder with the state of a run and, for the user to look at, its loss curve.

    Attributes:
        path: the folder.
        identity: JSON-ready inputs that the bits of the result depend on; only a run with the same inputs can resume.
    """

    path: Path
    identity: dict[str, Any]

    def check(self) -> None:
        """Check that the folder is empty, absent, or has the state of the same run.

        Raises:
            CoverageError: the state is of another run (the message names what differs), or the folder has other files.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CoverageError(f"work folder {self.path} is not a directory: give another one")
        if not (self.path / STATE_NAME).exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise CoverageError(f"work folder {self.path} has other files but no {STATE_NAME}: give another one")
            return
        found = self._metadata()["identity"]
        differing = sorted(key for key in found.keys() | self.identity if found.get(key) != self.identity.get(key))
        if differing:
            changes = ", ".join(f"{key} {found.get(key)!r}, now {self.identity.get(key)!r}" for key in differing[:3])
            raise CoverageError(
                f"work folder {self.path} has the state of another run ({changes}): give the same text and options to "
                "resume it, or delete the folder to start again"
            )

    def save(self, step: int, parameters: dict[str, Parameter], optimizer: Optimizer, points: list[Point]) -> None:
        """Write the state after ``step`` steps; the file is replaced at once."""
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            moments = optimizer.state[parameter]
            tensors |= {f"{name}:{key}": moments[key].detach().cpu().contiguous() for key in MOMENTS}
        metadata = {"identity": self.identity, "step": step, "points": points}
        write_atomically(self.path / STATE_NAME, save(tensors, {"run": json.dumps(metadata)}))
        write_points(self.path, points)

    @torch.no_grad()
    def resume(self, parameters: dict[str, Parameter], optimizer: Optimizer) -> tuple[int, list[Point]]:
        """Load the state into parameters and optimizer, if there is one.

        Returns:
            Completed steps and the loss curve so far; 0 and an empty list without a state.

        Raises:
            CoverageError: the file is damaged.
        """
        if not (self.path / STATE_NAME).exists():
            return 0, []
        metadata = self._metadata()
        try:
            with safe_open(self.path / STATE_NAME, "pt") as file:
                for name, parameter in parameters.items():
                    parameter.copy_(file.get_tensor(name))
                    optimizer.state[parameter] = {
                        # AdamW has its count of steps on the CPU
                        key: file.get_tensor(f"{name}:{key}").to("cpu" if key == "step" else parameter.device)
                        for key in MOMENTS
                    }
        except (OSError, SafetensorError, RuntimeError) as error:
            raise self._damaged(error) from error
        return metadata["step"], metadata["points"]

    def remove(self) -> None:
        """Delete the folder, after the result is written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _metadata(self) -> dict[str, Any]:
        try:
            with safe_open(self.path / STATE_NAME, "pt") as file:
                metadata = json.loads((file.metadata() or {})["run"])
            assert isinstance(metadata["identity"], dict)
            assert isinstance(metadata["points"], list)
            assert isinstance(metadata["step"], int)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AssertionError) as error:
            raise self._damaged(error) from error
        return metadata

    def _damaged(self, error: Exception) -> CoverageError:
        return CoverageError(
            f"{self.path / STATE_NAME} cannot be read ({error}): delete the work folder to start again"
        )
