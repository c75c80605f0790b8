"""What can be done about a failed build: one small function each, the most specific first."""

from __future__ import annotations

from windlass.image.remedies import compiling, network, packages, proving, system
from windlass.image.remedies.case import Case, Remedy

REMEDIES: tuple[Remedy, ...] = (
    network.disk,
    compiling.platform,
    compiling.managed_python,
    compiling.torch_at_build,
    compiling.nvcc,
    compiling.module_at_build,
    compiling.companion_abi,
    packages.contradiction,
    proving.read_conflicts,
    proving.second_nccl,
    proving.compiled_for_another_torch,
    packages.other_python,
    packages.no_version,
    system.not_root,
    system.missing_header,
    system.missing_compiler,
    system.missing_library,
    system.missing_program,
    system.apt_lists,
    system.apt_answers,
    network.retries,
)

__all__ = ["REMEDIES", "Case", "Remedy"]
