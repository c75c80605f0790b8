"""HyperPod's Managed Tiered Checkpointing, as far as windlass uses it: its HTTP service in the memory of the cluster.

The service is asked through the client of `amzn-sagemaker-checkpointing`, which sends an xxh3 checksum with every shard
and checks it when one comes back. A run's pieces go there by rank; its manifest, in the metadata shard, goes last.
The client and not that package's DCP writer: the writer reports a step as written before its metadata is, keeps the
metadata as a pickle, and cannot say of a step whether it is whole.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from windlass.checkpoint.folder import CHANGED
from windlass.checkpoint.manifest import FileRecord, Manifest
from windlass.errors import UserError

STEPS_RETAINED = 3
LISTED = 5


@dataclass(frozen=True)
class ManagedService:
    """One run's namespace. Ranks of another number are another namespace: the service fixes it at creation."""

    client: Any
    namespace: str
    endpoint: str

    @classmethod
    def connect(cls, name: str, run_id: str, *, rank: int, world_size: int, endpoint: str | None) -> ManagedService:
        try:
            from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
            from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient
        except ImportError:
            raise UserError(
                "checkpoint.managed_every needs amzn-sagemaker-checkpointing", fix="pip install 'windlass[hyperpod]'"
            ) from None
        settings = {"base_url": endpoint.rstrip("/")} if endpoint else {}
        config = InMemoryClientConfig(request_retries=4, retry_backoff=0.2, **settings)
        quiet = logging.getLogger("windlass.managed")
        quiet.setLevel(logging.CRITICAL)  # what it has to say comes as exceptions too, and is said once, by us
        namespace = f"{name}-{run_id}-{world_size}"
        client = InMemoryCheckpointClient(
            namespace=namespace,
            rank=str(rank),
            world_size=str(world_size),
            config=config,
            steps_retained=STEPS_RETAINED,
            logger=quiet,
        )
        return cls(client, namespace, config.base_url)

    def open(self) -> None:
        """Make the namespace if it is not there. One rank does it."""
        try:
            self.client.get_or_create_namespace()
        except Exception as error:
            raise UserError(
                "the Managed Tiered Checkpointing service cannot be used",
                evidence=f"{self.endpoint}: {error.__cause__ or error}",
                cause="it runs on HyperPod clusters whose TieredStorageConfig has Mode: Enable",
                fix="checkpoint.managed_every=null, or enable it on the cluster",
            ) from None

    def put(self, step: int, rank: int, data: bytes) -> None:
        self.client.put_checkpoint(step=step, data=data, rank=rank)

    def publish(self, manifest: Manifest) -> None:
        self.client.put_checkpoint(step=manifest.step, data=manifest.to_json().encode(), metadata_index=0)

    def get(self, step: int, rank: int) -> bytes | None:
        """A rank's piece; None if it is not there. An exception if it is damaged or the service cannot be asked."""
        data: bytes | None = self.client.get_checkpoint(step=step, rank=rank)
        return data

    def proven(self, step: int, rank: int, record: FileRecord) -> tuple[bytes, str | None]:
        """A rank's piece, and what is wrong with it."""
        try:
            data = self.get(step, rank)
        except Exception as error:  # the client's own: damaged in the service, or it cannot be asked
            return b"", str(error) or type(error).__name__
        if data is None:
            return b"", "it is missing"
        return data, None if hashlib.sha256(data).hexdigest() == record.sha256 else CHANGED

    def manifest(self, step: int) -> Manifest | None:
        data = self.client.get_checkpoint(step=step, metadata_index=0)
        return Manifest.parse(data.decode("utf-8"), step=step) if data else None

    def published(self) -> list[Manifest]:
        """The newest steps that are complete, oldest first."""
        manifests = []
        for step in sorted(self.client.get_latest_checkpoints(limit=LISTED)):
            try:
                manifest = self.manifest(step)
            except Exception:  # damaged on its way or in the service, whose client knows a dozen errors: no manifest
                continue
            if manifest is not None:
                manifests.append(manifest)
        return manifests

    def delete(self, step: int, world_size: int) -> None:
        """The manifest first, as everywhere."""
        self.client.delete_checkpoint(step=step, metadata_index=0)
        for rank in range(world_size):
            self.client.delete_checkpoint(step=step, rank=rank)

    def drop(self) -> None:
        """Everything of this run."""
        self.client.delete_namespace()
