"""Processes that tests start many of are forked from a server that has imported what takes long.

multiprocessing has one such server per process, and who sets its imports last decides for all: so they are set here.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])
