"""Changes that the check must find, in small packages that represent vLLM and our package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drift.check import REPOSITORY, Check
from tests.drift.names import Named, StandIn
from tests.drift.sources import Sources

LAYERS = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

@dataclass
class Parallel:
    use_ep: bool
    ranks: int = 1

class Config:
    parallel: Parallel
    def __init__(self, width, *, bias=False):
        self.width = width

class Method(ABC):
    def __init__(self, config: Config):
        self.config: Config = config
    @abstractmethod
    def apply(self, layer, x, scale=None): ...
    def load(self, layer, **extra):
        return "w1"

class Special(Method):
    extra = 1

def make(name: str, size: int = 1) -> Config: ...
"""

THEIRS = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .layers import Config as Config\n",
    "layers/__init__.py": "from .base import *\nfrom .base import Method as BaseMethod, make\nMaker = make\n",
    "layers/base.py": LAYERS,
    "layers/loading.py": "def outer():\n    def inner(param, name, *, strict=True): ...\n    return inner\n",
}

OURS = """
from vllm import Config
from vllm.layers import BaseMethod, Maker, Special, loading
import vllm.layers.base

class Ours(BaseMethod):
    def __init__(self, config: Config, name):
        super().__init__(config)
        if self.config.parallel.use_ep:
            self.name = name

    def apply(self, layer, x, scale=None):
        method = vllm.layers.base.Parallel(True, ranks=2)
        return Maker("a", size=2).width, method.ranks

    def load(self, layer, **extra):
        return super().load(layer, strict=True)

def look(value: object, config: "Config | None"):
    Config(1, bias=True)
    if isinstance(value, Special):
        return value.extra
    return value.anything, config.width

def wrapped():
    def load(given, param, name, *, strict): ...
"""


def check(tmp_path: Path, change: tuple[str, str, str] | None = None) -> Check:
    """Check ``OURS`` with ``THEIRS``, after replacing a text in one of the files."""
    for name, text in THEIRS.items():
        if change is not None and name == change[0]:
            assert change[1] in text
            text = text.replace(change[1], change[2])
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").write_text(OURS)
    done = Check(Sources({"vllm": tmp_path / "vllm", "ours": tmp_path / "ours"}), frozenset())
    done.module("ours")
    done.named(Named("vllm.layers.base.Method.load", ("w1",), "why"))
    done.named(Named("vllm.layers.Config", ("width", "parallel"), "why"))
    done.stand_in(StandIn("ours.wrapped.load", "vllm.layers.loading.outer.inner", 1, "why"))
    return done


def test_unchanged_sources_fit(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.moved == []
    assert done.unknown == []
    assert done.counts == {
        "imports": 6,
        "attributes": 13,
        "calls": 5,
        "overrides": 2,
        "names by hand": 3,
        "stand-ins": 1,
    }


BASE, INIT, LOADING = "layers/base.py", "layers/__init__.py", "layers/loading.py"
PREPARE = "@abstractmethod\n    def prepare(self): ...\n    def load"
COMMAND = (sys.executable, "-m", "tests.drift.check", "--sources")
MOVES = {
    "name": ("__init__.py", "Config as Config", "Method", "vllm.Config is missing"),
    "star import": (INIT, "import *", "import Config", "vllm.layers.Special is missing"),
    "alias": (INIT, "Maker =", "Other =", "vllm.layers.Maker is missing"),
    "re-exported": (BASE, "class Config", "class Settings", "vllm.Config is missing"),
    "keyword": (BASE, "size: int", "length: int", "vllm.layers.base.make takes no size"),
    "now required": (BASE, "*, bias", "other, bias", "vllm.layers.base.Config needs other"),
    "position": (BASE, "self, width, *,", "self, *, width=1,", "Config takes 0 arguments by position, we pass 1"),
    "field": (BASE, "ranks: int", "size: int", "vllm.layers.base.Parallel takes no ranks"),
    "call of super": (BASE, "layer, **extra", "layer", "vllm.layers.base.Method.load takes no strict"),
    "parameter renamed": (BASE, "layer, x, scale", "layer, y, scale", "Method.apply has y as its parameter 2, ours x"),
    "parameter added": (BASE, "scale=None", "scale=None, bias=None", "has bias as its parameter 4, ours None"),
    "keyword added": (BASE, "scale=None", "scale=None, *, bias=None", "takes bias, ours does not"),
    "parameter removed": (BASE, "layer, x, scale=None", "layer", "has no x, which ours needs"),
    "method": (BASE, "def load", "def read", "vllm.layers.base.Method has no load to override"),
    "abstract method": (BASE, "def load", PREPARE, "Method.prepare is abstract and ours.Ours has none"),
    "attribute": (BASE, "use_ep", "ep", "vllm.layers.base.Parallel has no use_ep"),
    "inherited attribute": (BASE, "self.config:", "self._config:", "ours.Ours has no config"),
    "narrowed": (BASE, "extra = 1", "other = 1", "vllm.layers.base.Special has no extra"),
    "text": (BASE, '"w1"', '"w2"', "vllm.layers.base.Method.load has no w1 (why)"),
    "by hand": (BASE, "self.width =", "self.size =", "vllm.layers.Config has no width (why)"),
    "stand-in": (LOADING, "strict", "exact", "outer.inner takes exact, ours does not (why)"),
    "no stand-in": (LOADING, "inner", "within", "vllm.layers.loading.outer.inner is missing (why)"),
}


@pytest.mark.parametrize(("file", "old", "new", "message"), MOVES.values(), ids=MOVES)
def test_changes_are_found(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    assert any(message in line for line in check(tmp_path, (file, old, new)).moved)


def test_unknown_base_is_reported(tmp_path: Path) -> None:
    """Attributes of a class that is built at run time cannot be checked."""
    done = check(tmp_path, (BASE, "class Config:\n    parallel: Parallel\n", "class Config(build()):\n"))
    assert done.moved == ["tests/drift/names.py:0: vllm.layers.Config has no parallel (why)"]
    assert done.unknown == ["ours:9: self.config.parallel"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run the command on this package, with the installed llm-compressor and an empty vLLM."""
    root = tmp_path_factory.mktemp("sources")
    (root / "vllm").mkdir()
    (root / "vllm" / "__init__.py").touch()
    (root / "vllm" / "_version.py").write_text("__version__ = version = '9.9'\n")
    command = [*COMMAND, f"vllm={root}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


@pytest.mark.slow
def test_command(checked: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    assert checked.returncode == 1
    assert "vllm 9.9" in checked.stdout
    assert "vllm.model_executor.layers.fused_moe.FusedMoEMethodBase is missing" in checked.stdout
    command = [*COMMAND, f"vllm={tmp_path / 'vllm' / 'none'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2
    assert "is not PACKAGE=DIRECTORY" in done.stderr


def test_installed(checked: subprocess.CompletedProcess[str]) -> None:
    """The compressing half fits the installed packages."""
    half, other = checked.stdout.partition("vllm 9.9")[::2]
    counted, *reported = half.splitlines()
    assert re.search(r"^llmcompressor \d\S*, .*: .*\b[1-9]\d* imports", counted)
    assert [line for line in reported if not line.startswith("  not decided: ")] == []
    assert " is missing" in other
