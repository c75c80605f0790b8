"""Time reading shards from S3, once they were read before, against the same shards on local disk."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.store.s3_server import running_s3
from windlass.data import Sequences, open_sequences
from windlass.data.shards.writing import ShardWriter
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.spec import parse_run
from windlass.store import open_store

SEQUENCE_LENGTH, GLOBAL_BATCH = 2048, 8
MILLION_TOKENS = 32
ROUNDS, STEPS = 300, 8  # short ones: the best of many is what the machine does undisturbed


def write_shards(folder: Path, million_tokens: int) -> None:
    """Shards of random tokens in documents of a few hundred."""
    tokenizer = load_tokenizer("tiny")
    draw = np.random.default_rng(0)
    writer = ShardWriter(folder, tokenizer, shard_tokens=5_000_000)
    while writer.num_tokens < million_tokens * 1_000_000:
        lengths = draw.integers(20, 1000, size=2000)
        writer.append(draw.integers(0, tokenizer.vocab_size, size=int(lengths.sum()), dtype=np.uint16), lengths)
    writer.finish()


def opened(source: str) -> Sequences:
    data = {"source": source, "sequence_length": SEQUENCE_LENGTH}
    found = open_sequences(
        parse_run({"name": "bench", "model": {"preset": "any"}, "data": data}), "train", tokenizer="tiny"
    )
    assert found is not None
    return found


def read(sequences: Sequences, steps: range) -> float:
    """Seconds to read the batches of some steps."""
    positions = list(range(GLOBAL_BATCH))
    begin = time.perf_counter()
    for step in steps:
        sequences.batch(step, GLOBAL_BATCH, positions)
    return time.perf_counter() - begin


def measure(million_tokens: int = MILLION_TOKENS, rounds: int = ROUNDS) -> dict[str, Any]:
    """The ratio of the best times, both taken in turns so that what else the machine does falls on both."""
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name, running_s3() as s3:
        os.environ.update({**s3.environment, "WINDLASS_CACHE": f"{name}/cache"})
        folder = Path(name) / "shards"
        write_shards(folder, million_tokens)
        s3.make_bucket("bench")
        store = open_store("s3://bench/shards")
        for path in folder.rglob("*"):
            if path.is_file():
                store.put(path, path.relative_to(folder).as_posix())
        local, remote = opened(str(folder)), opened("s3://bench/shards")
        assert local.num_sequences
        epoch = range(local.num_sequences // GLOBAL_BATCH + 1)
        cold_s = read(remote, epoch)
        read(local, epoch)
        asked = len(s3.requests)
        times: list[tuple[float, float]] = []
        for number in range(rounds):
            steps = range(number * STEPS, (number + 1) * STEPS)
            if number % 2:
                times.append((read(local, steps), read(remote, steps)))
            else:
                there = read(remote, steps)
                times.append((read(local, steps), there))
        assert len(s3.requests) == asked, "everything was here by then"
        for step in (0, 7):
            ours, theirs = (one.batch(step, 4, [0, 1, 2, 3]).sequences for one in (remote, local))
            assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))
    local_s, remote_s = (min(column) for column in zip(*times, strict=True))
    tokens = STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH
    return {
        "million_tokens": million_tokens,
        "cold_epoch_s": round(cold_s, 2),
        "local_tokens_per_s": round(tokens / local_s),
        "store_tokens_per_s": round(tokens / remote_s),
        "ratio": round(remote_s / local_s, 3),
        "median_ratio": round(statistics.median(remote / local for local, remote in times), 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million-tokens", type=int, default=MILLION_TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))
