"""Which object of which cluster a run folder belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from windlass.common.files import write_atomically
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.manifests.cluster_facts import JobKind, ServedKind
from windlass.targets.kubernetes.manifests.labels import DIGEST_ANNOTATION
from windlass.targets.kubernetes.manifests.request import PodLayout

if TYPE_CHECKING:
    from windlass.targets.kubernetes.api.kubeconfig import Access

JOB_FILE = "kubernetes.json"


@dataclass(frozen=True)
class ClusterJob:
    """A submitted job, as it is found again: also when another context has become the current one."""

    context: str
    namespace: str
    kind: JobKind
    api_version: str
    plural: str
    object_name: str
    uid: str
    digest: str
    submission: str
    layout: PodLayout
    ended: bool = False  # the cluster has said so: it need not be asked again
    adopted: bool = False  # submitted elsewhere: the run file here came from the cluster

    @property
    def path(self) -> str:
        return object_path(self.api_version, self.plural, self.namespace, self.object_name)

    @property
    def loop_name(self) -> str:
        return f"{self.object_name}-loop"

    @property
    def pods_path(self) -> str:
        return object_path("v1", "pods", self.namespace)

    def names(self, name: str) -> bool:
        """Whether an object is called after this job: itself, its pods, and what goes with it."""
        is_of_loop = name == self.loop_name or name.startswith(f"{self.loop_name}-")
        return not is_of_loop and (name == self.object_name or name.startswith(f"{self.object_name}-"))

    def write(self, folder: RunFolder) -> None:
        write_atomically(folder.path / JOB_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def of_object(
        cls,
        access: Access,
        kind: JobKind,
        served: ServedKind,
        value: Mapping[str, Any],
        layout: PodLayout,
        **known: Any,
    ) -> ClusterJob:
        """The job of an object that is in the cluster."""
        metadata = value["metadata"]
        return cls(
            context=access.context,
            namespace=access.namespace,
            kind=kind,
            api_version=served.api_version,
            plural=served.plural,
            object_name=metadata["name"],
            uid=metadata["uid"],
            digest=str((metadata.get("annotations") or {}).get(DIGEST_ANNOTATION) or ""),
            layout=layout,
            **known,
        )

    @classmethod
    def of(cls, folder: RunFolder) -> ClusterJob | None:
        try:
            return cls(**json.loads((folder.path / JOB_FILE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):  # a file that windlass did not write names no job
            return None


def object_path(api_version: str, plural: str, namespace: str | None, name: str | None = None) -> str:
    """`/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/my-run`"""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{plural}" + (f"/{name}" if name else "")


def plural_of(kind: str) -> str:
    """The plural of a kind that goes with a job; the job's own comes from discovery."""
    return f"{kind.lower()}s"
