"""Write the Dockerfile of a planned image. Pure: ingredients in, text out.

The build context must hold `.windlass/`: the files of `files_of`, and a copy of the windlass package in
`.windlass/windlass`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from windlass.image.facts.bases import Base
from windlass.image.facts.table import Build, facts
from windlass.image.read.requirements import Place, Wanted, wanted_of

FOLDER = ".windlass"
REQUIREMENTS = f"{FOLDER}/requirements.txt"
CONSTRAINTS = f"{FOLDER}/constraints.txt"
OWN = f"{FOLDER}/own-requirements.txt"
VENV = "/opt/venv"
CODE_FOLDER = "/workspace"
SYSTEM = ("ca-certificates", "curl", "git", "gcc", "g++", "libc6-dev")
UBUNTU_PYTHON = ("python3", "python3-dev", "python3-venv")
BUILD_TOOLS = "setuptools wheel packaging ninja psutil"
AGENT = "hyperpod-elastic-agent"


@dataclass(frozen=True)
class Ingredients:
    """Everything that a Dockerfile is written from."""

    platform: str
    base: Base
    python: str | None  # None: the base image's own, whatever it is
    torch: str | None  # with its local version, 2.14.1+cu126; None: the base image's
    index: str | None  # where torch is, beside PyPI
    build: Build | None  # None: CPU, or the base image's own torch
    efa: str | None
    agent: str | None
    compiled: tuple[str, ...]  # requirements that compile against torch
    companions: tuple[str, ...]  # torchvision and torchaudio, where they are asked for: of torch's own index
    pip: tuple[str, ...]
    apt: tuple[str, ...]
    own: tuple[Wanted, ...] = ()  # of image.requirements, with the files it names
    own_options: tuple[str, ...] = ()  # its --extra-index-url and the like


def dockerfile_of(of: Ingredients) -> str:
    return "\n\n".join(block for block in _blocks(of) if block) + "\n"


def _blocks(of: Ingredients) -> Iterator[str]:
    yield f"FROM {of.base.image}"
    yield (
        "# torch finds the GPUs through NVIDIA's container runtime, which reads these.\n"
        "ENV NVIDIA_VISIBLE_DEVICES=all \\\n"
        "    NVIDIA_DRIVER_CAPABILITIES=compute,utility \\\n"
        "    PYTHONUNBUFFERED=1 \\\n"
        "    PIP_NO_CACHE_DIR=1"
    )
    own_python = of.python is not None and of.base.family != "python"
    packages = sorted({*SYSTEM, *(UBUNTU_PYTHON if own_python else ()), *of.apt})
    yield (
        "# The compiler and Python's headers are for torch.compile, which calls them on the nodes.\n"
        "RUN apt-get update \\\n"
        f"    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {' '.join(packages)} \\\n"
        "    && rm -rf /var/lib/apt/lists/*"
    )
    if of.efa:
        yield efa_block(of.efa)
    if own_python:
        yield f'RUN python3 -m venv {VENV}\nENV VIRTUAL_ENV={VENV} PATH="{VENV}/bin:$PATH"'
    elif of.base.family != "python":
        yield "ENV PIP_BREAK_SYSTEM_PACKAGES=1"
    yield f"COPY {' '.join(files_of(of))} /opt/windlass/"
    if of.torch:
        index = f" --extra-index-url {of.index}" if of.index else ""
        torch = " ".join((f"torch=={of.torch}", *of.companions))
        yield f"RUN pip install --no-cache-dir{index} -c /opt/windlass/constraints.txt {torch}"
    else:
        yield (
            "# The base image's own torch stays: whatever is installed later must go with it.\n"
            "RUN python -c \"import torch; print('torch==' + torch.__version__)\" >> /opt/windlass/constraints.txt"
        )
    own = f" -r /opt/windlass/{Path(OWN).name}" if OWN in files_of(of) else ""
    yield f"RUN pip install --no-cache-dir -c /opt/windlass/constraints.txt -r /opt/windlass/requirements.txt{own}"
    if of.compiled:
        yield (
            "# These compile against the torch above.\n"
            f"RUN pip install --no-cache-dir -c /opt/windlass/constraints.txt {BUILD_TOOLS} \\\n"
            "    && pip install --no-cache-dir --no-build-isolation -c /opt/windlass/constraints.txt "
            + " ".join(f"'{requirement}'" for requirement in of.compiled)
        )
    yield f'RUN python -c "{check_program(of)}"'
    yield (
        f"COPY {FOLDER}/windlass /opt/windlass/windlass\n"
        f"ENV PYTHONPATH=/opt/windlass:{CODE_FOLDER}\n"
        "RUN printf '#!/bin/sh\\nexec python -m windlass.cli.main \"$@\"\\n' > /usr/local/bin/windlass \\\n"
        "    && chmod 755 /usr/local/bin/windlass && windlass --version\n"
        f"WORKDIR {CODE_FOLDER}"
    )


def efa_block(version: str) -> str:
    """EFA's libraries without its kernel module, and the NCCL plugin where the loader finds it: else NCCL uses TCP."""
    url = facts()["efa"]["url"].format(version=version)
    return (
        f"RUN curl -fsSL --retry 5 {url} | tar xz -C /tmp \\\n"
        "    && cd /tmp/aws-efa-installer && apt-get update \\\n"
        "    && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \\\n"
        "    && cd / && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/* \\\n"
        '    && plugin="$(find /opt/amazon -name \'libnccl-net*.so\' -print -quit)" && test -n "$plugin" \\\n'
        '    && printf \'%s\\n\' "$(dirname "$plugin")" /opt/amazon/efa/lib > /etc/ld.so.conf.d/000-efa.conf \\\n'
        "    && ldconfig\n"
        'ENV PATH="/opt/amazon/efa/bin:$PATH"'
    )


def check_program(of: Ingredients) -> str:
    """Fails the build where the torch in the image is not the planned one, or a second NCCL came along."""
    checks = ["import torch, importlib.metadata as m"]
    if of.torch:
        checks.append(f"assert torch.__version__.split('+')[0] == '{of.torch.split('+')[0]}', torch.__version__")
    if of.build:
        checks.append(f"assert torch.version.cuda.startswith('{of.build.cuda}'), torch.version.cuda")
        checks.append("names = [str(d.metadata['Name']) for d in m.distributions()]")
        checks.append("nccl = sorted(n for n in names if n.startswith('nvidia-nccl-'))")
        checks.append(f"assert nccl == ['{of.build.nccl_package}'], nccl")
    checks.append("print('torch', torch.__version__, 'CUDA', torch.version.cuda)")
    return "; ".join(checks)


def files_of(of: Ingredients) -> dict[str, str]:
    """What the build copies beside windlass itself."""
    wanted = [*own_requirements(), *of.pip, *([f"{AGENT}=={of.agent}"] if of.agent else ())]
    held = [f"torch=={of.torch}", *of.companions] if of.torch else []
    chosen = ("torch", "torchvision", "torchaudio")
    held += [record.text for record in of.own if record.constraint and record.name not in chosen]
    # packages that have an instruction of their own
    elsewhere = {"torch", *(wanted_of(text, Place("", 1)).name for text in (*of.compiled, *of.companions))}
    own = [record.text for record in of.own if not record.constraint and record.name not in elsewhere]
    files = {REQUIREMENTS: wanted, CONSTRAINTS: held} | ({OWN: [*of.own_options, *own]} if own else {})
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in files.items()}


def own_requirements() -> list[str]:
    """What windlass needs for its trainer and for the retry loop of detached runs, torch apart."""
    needed = []
    for requirement in map(Requirement, requires("windlass") or ()):
        marker = requirement.marker
        if marker and "extra" in str(marker):
            if not any(marker.evaluate({"extra": extra}) for extra in ("train", "k8s")):
                continue
            requirement.marker = None
        if requirement.name != "torch":
            needed.append(str(requirement))
    return needed
