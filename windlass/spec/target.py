"""The `target` section of the run file: where a run goes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from windlass.spec.kubernetes import KubernetesOptions
from windlass.spec.section import Section
from windlass.spec.slurm import SlurmOptions


class TargetSection(Section):
    """Where the run goes."""

    kind: Literal["local", "slurm", "kubernetes"] = "local"
    """`local`: this machine · `slurm`: a Slurm cluster, from here or over SSH · `kubernetes`: a cluster of your
    kubeconfig."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Rendezvous port. Default: a free one; 29400 on Kubernetes, in the first pod."""
    host: Annotated[str, Field(pattern=r"^[^\s-]\S*$")] | None = None
    """Login node to submit to Slurm from over SSH, by its name in your own ssh configuration. The run folder must be at
    the same path there. Default: Slurm's commands are called here."""
    max_restarts: NonNegativeInt = 3
    """How often a rank's death (a signal, a lost peer) is answered by a restart from the last checkpoint. Errors that
    would come again are not retried."""
    slurm: SlurmOptions = SlurmOptions()
    """Options of the Slurm target."""
    kubernetes: KubernetesOptions = KubernetesOptions()
    """Options of the Kubernetes target."""

    @model_validator(mode="after")
    def only_slurm_has_a_host(self) -> Self:
        if self.host and self.kind != "slurm":
            raise ValueError(f"target.host is a Slurm login node, but target.kind is {self.kind}")
        return self
