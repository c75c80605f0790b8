"""Imported once by the fork server, so that a rank starts in a fraction of a second instead of ten, a command too."""

import gc
import importlib
import pkgutil

import boto3  # noqa: F401
import datasets  # noqa: F401
import tokenizers  # noqa: F401
import torch
import torch.distributed.checkpoint
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import tests.data.killing
import tests.trainer.harness  # noqa: F401
import windlass.data.build.destinations
import windlass.data.build.fetching
import windlass.data.build.tokenizing
import windlass.store.s3
import windlass.trainer.export
import windlass.trainer.main  # noqa: F401

for package in ("windlass.cli", "windlass.targets", "windlass.clusters"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)

torch.set_num_threads(1)
gc.freeze()  # so that a process need not look through, and copy, what all of them share
