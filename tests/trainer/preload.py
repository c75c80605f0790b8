"""Imported once by the fork server, so that a rank starts in a fraction of a second instead of ten."""

import gc

import torch
import torch.distributed.checkpoint
import transformers.models.llama.modeling_llama
import transformers.models.mistral.modeling_mistral
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import tests.trainer.harness  # noqa: F401
import windlass.trainer.export
import windlass.trainer.main  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # a rank that collects garbage need not look through, and copy, what all ranks share
