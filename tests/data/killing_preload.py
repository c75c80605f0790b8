"""Imported once by the fork server: what takes long to import."""

import boto3  # noqa: F401
import datasets  # noqa: F401
