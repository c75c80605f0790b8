"""The model card of an export: README.md with the Hub's front matter, filled from the run.

A card may be published: it names no path of this machine, no address, and nothing of the environment.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from windlass import __version__
from windlass.checkpoint.manifest import Manifest
from windlass.common.files import read_json_lines, real, whole
from windlass.common.hub import is_hub_id
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import Run
from windlass.trainer.model.structure import weights_path

CARD_FILE = "README.md"
UNKNOWN_LICENSE = "unknown"


def write_card(
    export: Path, folder: RunFolder, run: Run, manifest: Manifest, *, kind: str, dtype: str, license: str | None = None
) -> None:
    """Write the card of an export: `kind` is model or adapter."""
    evaluations = [record for record in read_json_lines(folder.evaluations) if record.get("step") == manifest.step]
    rows = {(row["task"], row["metric"], row["filter"]): row for record in evaluations for row in record["results"]}
    results = [row for row in rows.values() if row["value"] is not None]
    front_matter = _front_matter(run, results, kind=kind, license=license)
    sections = [
        f"---\n{front_matter}\n---\n\n# {run.name}",
        _origin(run, kind),
        "## How to load it\n\n" + _loading(run, kind),
        "## Data\n\n" + "\n".join(f"- {_described(source)}" for source in _sources(run)),
        "## Training\n\n" + _table(("", ""), _recipe(folder, run, manifest, dtype)),
    ]
    if results:
        header = ("task", "metric", "value", "standard error", "shots", "examples")
        sections.append("## Evaluation\n\n" + _table(header, [_evaluated(row) for row in results]))
    if license is None:
        sections.append("The licence was not stated when this was exported.")
    (export / CARD_FILE).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def base_model(run: Run) -> str | None:
    """The Hub's name of the model that training began with; None for random weights, and for a folder."""
    is_pretrained = run.model.init == "pretrained" or run.model.lora is not None
    path = weights_path(run.model) if is_pretrained else None
    return path if path and is_hub_id(path) else None


def _front_matter(run: Run, results: list[dict[str, Any]], *, kind: str, license: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    measured = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=row["task"],
            metric_type=row["metric"],
            metric_name=_metric(row),
            metric_value=row["value"],
        )
        for row in results
    ]
    base = base_model(run)
    data = ModelCardData(
        license=license or UNKNOWN_LICENSE,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if kind == "adapter" else "finetune") if base else None,
        datasets=sorted({source.removeprefix("hf:") for source in _sources(run) if _is_hub_dataset(source)}) or None,
        tags=["windlass", *(["lora"] if run.model.lora else []), *(["dpo"] if run.train.objective == "dpo" else [])],
        eval_results=measured or None,
        model_name=run.name if measured else None,
    )
    return data.to_yaml().strip()


def _origin(run: Run, kind: str) -> str:
    what = "A LoRA adapter" if kind == "adapter" else "A language model"
    if run.model.init == "pretrained" or run.model.lora is not None:
        base = base_model(run)
        begun = f"fine-tuned from [{base}](https://huggingface.co/{base})" if base else "fine-tuned from a local model"
    else:
        begun = f"trained from random weights ({PurePosixPath(run.model.label).name})"
    return f"{what}, {begun} with windlass {__version__}."


def _loading(run: Run, kind: str) -> str:
    kind_of_model = "AutoPeftModelForCausalLM" if kind == "adapter" else "AutoModelForCausalLM"
    lines = [
        f"from {'peft' if kind == 'adapter' else 'transformers'} import {kind_of_model}",
        "from transformers import AutoTokenizer",
        "",
        'place = "."  # this folder, or the name of this repository',
        f"model = {kind_of_model}.from_pretrained(place)",
        "tokenizer = AutoTokenizer.from_pretrained(place)",
    ]
    note = (
        "\n\nThe class of the model is code of its authors', which is not in this folder."
        if run.model.own_class
        else ""
    )
    return "```python\n" + "\n".join(lines) + "\n```" + note


def _recipe(folder: RunFolder, run: Run, manifest: Manifest, dtype: str) -> list[tuple[str, ...]]:
    train, lora = run.train, run.model.lora
    steps = {number: record for number, record in steps_of(folder).items() if number <= manifest.step}
    loss = real(steps[max(steps)].get("loss")) if steps else None
    validations = [record for record in read_json_lines(folder.metrics) if record.get("kind") == "validation"]
    validated = {whole(record.get("step")) or 0: real(record.get("loss")) for record in validations}
    last = max((step for step in validated if step <= manifest.step), default=0)
    validation = validated.get(last)
    rows = [
        ("steps", f"{manifest.step:,} of {train.steps:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("objective", f"DPO, β = {train.dpo_beta}" if train.objective == "dpo" else "next token"),
        ("loss", f"{loss:.4f}" if loss is not None else None),
        ("validation loss", f"{validation:.4f} (step {last:,})" if validation is not None else None),
        ("parameters", f"{manifest.model['num_parameters']:,}" if manifest.model.get("num_parameters") else None),
        ("adapter", f"LoRA, rank {lora.rank}, alpha {lora.alpha}" if lora else None),
        ("sequence length", f"{run.data.sequence_length:,} tokens" if run.data.sequence_length else None),
        ("global batch", f"{train.global_batch:,} sequences"),
        ("optimizer", f"{'own code' if train.optimizer else 'AdamW'}, weight decay {train.weight_decay}"),
        ("learning rate", f"{train.learning_rate:g}, {train.schedule}, {train.warmup_steps or 0:,} steps of warm-up"),
        ("precision", f"{train.precision}; these weights are {dtype}"),
        ("seed", str(train.seed)),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _sources(run: Run) -> list[str]:
    return [part.source for part in run.data.sources] or [run.data.source]


def _is_hub_dataset(source: str) -> bool:
    return source.startswith("hf:") and source.count("/") == 1


def _described(source: str) -> str:
    """A source without its place: folders, buckets and addresses are nobody else's business."""
    if _is_hub_dataset(source):
        name = source.removeprefix("hf:")
        return f"[{name}](https://huggingface.co/datasets/{name})"
    if source.startswith("corpus:"):
        return f"the text `{source.removeprefix('corpus:')}` that windlass ships"
    if source.startswith("python:"):
        return f"a dataset of own code, `{source.removeprefix('python:')}`"
    return f"`{PurePosixPath(urlsplit(source).path).name or 'files'}`"


def _metric(row: dict[str, Any]) -> str:
    return f"{row['metric']} ({row['filter']})" if row["filter"] else str(row["metric"])


def _evaluated(row: dict[str, Any]) -> tuple[str, ...]:
    stderr = f"{row['stderr']:.4f}" if row["stderr"] is not None else ""
    return row["task"], _metric(row), f"{row['value']:.4f}", stderr, str(row["shots"] or 0), f"{row['samples'] or 0:,}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
