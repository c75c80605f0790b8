"""Time text to token shards against batched `datasets.map` to Arrow: the same tokenizer, text and processes."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from windlass.data.build.tokenizing import tokenize
from windlass.data.sources.source import FileSource, assets
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

WORKERS = 2
MEGABYTES = 40


def write_corpus(path: Path, megabytes: int) -> int:
    """JSON lines made of the shipped text: paragraphs in random order, documents of very different lengths."""
    with gzip.open(assets() / "austen.jsonl.gz", "rt", encoding="utf-8") as lines:
        paragraphs = [one for line in lines for one in json.loads(line)["text"].splitlines()]
    choose = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as out:
        while written < megabytes << 20:
            text = "\n".join(choose.choices(paragraphs, k=1 + int(choose.expovariate(1 / 8))))
            written += out.write(json.dumps({"text": text, "url": f"https://example.org/{written}"}) + "\n")
    return path.stat().st_size


def time_windlass(source: Path, out: Path, tokenizer: Tokenizer) -> tuple[float, int, int]:
    begin = time.perf_counter()
    index = tokenize([FileSource((source,), "text", "bench")], out, tokenizer, workers=WORKERS)
    return time.perf_counter() - begin, index.num_tokens, index.num_documents


def time_datasets(source: Path, folder: Path, tokenizer: Tokenizer) -> tuple[float, float, int]:
    """Seconds to load the file and seconds to map it, which is timed for the comparison on its own, and the tokens."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    tokenizer.save(folder / "tokenizer")
    fast: Any = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    eos = fast.eos_token_id

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = fast(batch["text"], return_attention_mask=False)["input_ids"]
        return {"input_ids": [[*one, eos] for one in ids]}

    begin = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder / "cache"))
    middle = time.perf_counter()
    mapped = loaded.map(encode, batched=True, num_proc=WORKERS, remove_columns=loaded.column_names)
    end = time.perf_counter()
    num_tokens = sum(len(one) for one in mapped.with_format("arrow")["input_ids"])
    return middle - begin, end - middle, num_tokens


def measure(megabytes: int = MEGABYTES, repeats: int = 2) -> dict[str, Any]:
    """Both times, the best of `repeats`, and their ratio. The time of `datasets` leaves loading the JSON out."""
    tokenizer = load_tokenizer("tiny")
    ours: list[float] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
            folder = Path(name)
            source = folder / "text.jsonl"
            num_bytes = write_corpus(source, megabytes)
            seconds, num_tokens, num_documents = time_windlass(source, folder / "shards", tokenizer)
            ours.append(seconds)
            load_s, map_s, num_mapped = time_datasets(source, folder, tokenizer)
            theirs.append((map_s, load_s))
            if num_mapped != num_tokens:
                raise AssertionError(f"{num_tokens} tokens in shards, {num_mapped} in Arrow")
    map_s, load_s = min(theirs)
    return {
        "megabytes": round(num_bytes / 1e6, 1),
        "documents": num_documents,
        "tokens": num_tokens,
        "workers": WORKERS,
        "windlass_s": round(min(ours), 2),
        "datasets_map_s": round(map_s, 2),
        "datasets_load_s": round(load_s, 2),
        "windlass_tokens_per_s": round(num_tokens / min(ours)),
        "ratio": round(map_s / min(ours), 2),
        "ratio_with_load": round((map_s + load_s) / min(ours), 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--repeats", type=int, default=2)
    print(json.dumps(measure(**vars(parser.parse_args())), indent=1))
