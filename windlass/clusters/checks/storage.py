"""Storage: the claim of the run, and classes that can make one that all pods share."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.needs import Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot, name_of

# Provisioners whose volumes many nodes can mount for writing at once.
SHARED = (
    *("fsx.csi.aws.com", "efs.csi.aws.com", "fsx.openzfs.csi.aws.com", "s3.csi.aws.com"),
    *("filestore.csi.storage.gke.io", "lustre.csi.storage.gke.io", "gcsfuse.csi.storage.gke.io"),
    *("file.csi.azure.com", "azurelustre.csi.azure.com", "nfs.csi.k8s.io", "cephfs.csi.ceph.com"),
    *("csi.weka.io", "csi.vastdata.com", "lustre.csi.hpe.com", "beegfs.csi.netapp.com"),
)
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def claim(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if needs.claim is None:
        return
    if isinstance(snapshot.claims, Refusal):
        yield skipped(f"the claim {needs.claim} was not looked at", str(snapshot.claims))
        return
    names = [name_of(value) for value in snapshot.claims]
    if needs.claim not in names:
        yield failed(
            f"there is no claim {needs.claim} in the namespace {snapshot.namespace}",
            evidence=f"claims there: {', '.join(names) or 'none'}",
            fix=(f"target.kubernetes.storage=pvc:{names[0]}    or " if names else "")
            + "windlass cluster fix RUN_FILE --storage-class CLASS",
        )
        return
    value = snapshot.claims[names.index(needs.claim)]
    phase, modes = (value.get("status") or {}).get("phase"), (value.get("spec") or {}).get("accessModes") or []
    if needs.num_pods > 1 and "ReadWriteMany" not in modes:
        yield failed(
            f"the claim {needs.claim} cannot be used by {needs.num_pods} nodes at once",
            evidence=f"its access modes: {', '.join(modes)}",
            fix="a claim with ReadWriteMany: FSx for Lustre, EFS, Filestore",
        )
    elif phase == "Bound":
        yield passed(f"the claim {needs.claim} is bound ({', '.join(modes)})")
    else:
        yield (warning if phase == "Pending" else failed)(
            f"the claim {needs.claim} is {phase}",
            evidence=f"status.phase of {snapshot.namespace}/{needs.claim}",
            fix=f"kubectl -n {snapshot.namespace} describe pvc {needs.claim}",
        )


def storage_classes(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if isinstance(snapshot.storage_classes, Refusal):
        yield skipped("storage classes were not looked at", str(snapshot.storage_classes))
        return
    drivers = None
    if not isinstance(snapshot.csi_drivers, Refusal):
        drivers = {name_of(driver) for driver in snapshot.csi_drivers}
    shared = []
    for value in snapshot.storage_classes:
        name, provisioner = name_of(value), str(value.get("provisioner") or "")
        if drivers is not None and "." in provisioner and "csi" in provisioner and provisioner not in drivers:
            yield warning(
                f"the storage class {name} has no driver: its claims stay unbound",
                evidence=f"provisioner {provisioner}; CSI drivers: {', '.join(sorted(drivers)) or 'none'}",
                fix=f"install the driver {provisioner}",
            )
        elif provisioner.endswith(SHARED):  # Rook puts its namespace before the name
            shared.append(name)
    defaults = [
        name_of(value)
        for value in snapshot.storage_classes
        if (value["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"
    ]
    if shared:
        yield passed(f"classes that many nodes can share: {', '.join(shared)}")
    elif needs.claim is None and needs.num_pods != 1:
        yield warning(
            "no storage class is known to make volumes that many nodes can share",
            evidence=f"classes: {', '.join(map(name_of, snapshot.storage_classes)) or 'none'}",
            fix="checkpoint.store=s3://BUCKET/…    needs none; or FSx for Lustre, EFS, Filestore, NFS",
        )
    if len(defaults) > 1:
        yield warning(f"several storage classes are the default: {', '.join(defaults)}")
