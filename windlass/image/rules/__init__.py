"""What can be wrong with the resolved state of an image: one small function each, the gravest first."""

from __future__ import annotations

from windlass.image.rules import compiled, packages, runtime, secrets, system, torch
from windlass.image.rules.finding import Case, Finding, Repair, Rule

RULES: tuple[Rule, ...] = (
    system.platform,
    system.empty_argument,
    packages.unresolvable,
    torch.index_tag,
    torch.cpu_only,
    torch.driver_without_gpu,
    torch.driver_too_old,
    torch.gpu_code,
    torch.package_on_gpu,
    packages.replaced,
    packages.refused_names,
    packages.removed_from_python,
    packages.refused_metadata,
    packages.unsatisfied,
    packages.unsaid_bounds,
    packages.imports,
    torch.companion_build,
    torch.made_for_torch,
    torch.two_nccl,
    packages.numpy_abi,
    packages.wheel_tags,
    compiled.torch_while_building,
    compiled.build_modules,
    compiled.old_source,
    compiled.nvcc,
    compiled.architecture_list,
    compiled.gpu_while_building,
    compiled.cuda_home,
    compiled.compiler,
    compiled.other_torch,
    system.failing,
    system.start,
    system.managed_python,
    system.copied_environment,
    system.permission,
    system.system_library,
    system.cuda_packages,
    system.efa,
    system.library_path,
    system.variables,
    runtime.compiles_at_run_time,
    runtime.deepspeed_operators,
    runtime.moved_environment,
    runtime.interpreter_of_root,
    runtime.library_order,
    runtime.efa_folder,
    runtime.driver_in_image,
    secrets.secrets,
)

__all__ = ["RULES", "Case", "Finding", "Repair", "Rule"]
