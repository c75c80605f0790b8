"""What can be wrong with a recipe: one small function each, the gravest first."""

from __future__ import annotations

from windlass.image.conflict import Rule
from windlass.image.rules import companions, habits, network, torchbuild

RULES: tuple[Rule, ...] = (
    torchbuild.wrong_platform,
    companions.agent,
    torchbuild.driver_too_old,
    torchbuild.gpu_too_new,
    torchbuild.torch_cuda,
    torchbuild.base_torch,
    torchbuild.python_of_torch,
    companions.companions,
    companions.two_nccl,
    companions.required_by_torch,
    companions.flash_attn_wheel,
    companions.compiled_packages,
    torchbuild.base_cuda,
    torchbuild.unpinned_torch,
    network.efa,
    habits.library_path,
    habits.secrets,
    habits.externally_managed,
    habits.apt_habits,
    habits.latest_tag,
    habits.compiler_for_torch,
    habits.conda,
    habits.pip_cache,
)
