"""Imported once by the fork server: what takes long to import."""

import gc

import boto3  # noqa: F401
import datasets  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401  (datasets imports it when it streams)
import windlass.data.sources.fetch_destination
import windlass.data.sources.fetching

import tests.data.killing  # noqa: F401
import windlass.data.build.tokenizing
import windlass.data.tokenizers.tokenizer
import windlass.store.s3  # noqa: F401

gc.freeze()  # so that a process need not look through, and copy, what all of them share
