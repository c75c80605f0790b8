"""Stand-ins for the packages that training images are made of.

Names, versions and requirements are those of the published wheels; the code is a line or two, so that a conflict which
pip and imports decide by metadata is a real one, without gigabytes. Tests that need torch itself mount the real one.
"""

from __future__ import annotations

from tests.image.wheels import Wheel

TORCH = """
__version__ = {version!r}
class version:
    cuda = None
"""
# flash-attn is compiled against one torch, and says so only when it is imported.
FLASH = """
import torch
__version__ = "2.8.3"
if not torch.__version__.startswith("2.14"):
    raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE")
"""


def torch(version: str, *requires: str) -> Wheel:
    return Wheel("torch", version, requires, TORCH.format(version=version))


WHEELS = [
    torch("2.15.0", "nvidia-nccl-cu13==2.30.7"),
    torch("2.14.1", "nvidia-nccl-cu13==2.30.7"),
    torch("2.14.0", "nvidia-nccl-cu13==2.30.7"),
    torch("2.13.0", "nvidia-nccl-cu13==2.29.7"),
    torch("2.11.0", "nvidia-nccl-cu13==2.28.9"),
    Wheel("torchvision", "0.28.0", ["torch==2.13.0"]),
    Wheel("torchvision", "0.29.0", ["torch==2.14.0"]),
    Wheel("torchvision", "0.29.2", ["torch>=2.14.0"]),
    Wheel("nvidia-nccl-cu13", "2.30.7"),
    Wheel("nvidia-nccl-cu13", "2.29.7"),
    Wheel("nvidia-nccl-cu13", "2.28.9"),
    Wheel("nvidia-nccl-cu12", "2.29.3"),
    Wheel("transformers", "5.22.2", ["tokenizers>=0.22,<0.24", "numpy"]),
    Wheel("tokenizers", "0.23.3"),
    Wheel("tokenizers", "0.20.0"),
    Wheel("numpy", "2.4.6"),
    Wheel("safetensors", "0.8.0"),
    Wheel("flash-attn", "2.8.3", ["torch"], FLASH),
    Wheel("hyperpod-elastic-agent", "1.1.3", ["torch>=2.4.0,<2.12.0"]),
]
