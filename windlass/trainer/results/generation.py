"""Go on with a prompt, token by token: what a trained model says."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.data.sequences.opening import tokenizer_of
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.trainer.export import opened, reading, whole_model


@dataclass(frozen=True)
class Speaker:
    """A model and its tokenizer, ready to generate."""

    model: Any
    tokenizer: Any
    step: int | None  # of the checkpoint; None: of a folder


def is_model_folder(name: str) -> bool:
    """Whether a name means a Hugging Face folder rather than a run."""
    return any((Path(name) / file).is_file() for file in ("config.json", "adapter_config.json"))


def speaker_of(name: str, step: int | None) -> Speaker:
    """The model of a run, by its name, or of a folder."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if not is_model_folder(name):
        return of_run(RunFolder.find(name), step)
    if step is not None:
        raise UserError(
            f"{name} is a folder with one model", cause="--step chooses a checkpoint of a run", fix="leave --step out"
        )
    return of_folder(Path(name))


def of_run(folder: RunFolder, step: int | None) -> Speaker:
    """The model of a complete checkpoint, the newest or the one named; an adapter is merged into its model."""
    from transformers import AutoTokenizer

    run = folder.load_run()
    with reading(folder, step) as checkpoint, tempfile.TemporaryDirectory() as temporary:
        parts = opened(folder, run, checkpoint)
        model: Any = whole_model(run, parts, checkpoint)
        if not hasattr(model, "generate"):
            raise UserError(
                f"{run.model.label} cannot generate",
                cause="transformers' subclasses of PreTrainedModel with GenerationMixin can",
            )
        tokenizer_of(run.data, parts.located.tokenizer).save(Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(temporary)
        return Speaker(_ready(model), tokenizer, checkpoint.step)


def of_folder(folder: Path) -> Speaker:
    """The model of a Hugging Face folder, as `ckpt export` writes it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter", cause="of a RUN it is merged into its model", fix="name the run")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return Speaker(_ready(model), AutoTokenizer.from_pretrained(folder), None)


def _ready(model: Any) -> Any:
    on_gpu = torch.cuda.is_available()
    model.config.use_cache = True
    return (model.to("cuda", torch.bfloat16) if on_gpu else model).eval()


def generate(
    speaker: Speaker,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    chat: bool,
    say: Callable[[str], None],
) -> tuple[str, int, float]:
    """The text that follows a prompt, its number of tokens and the seconds it took; `say` gets it piece by piece."""
    from transformers.generation.streamers import TextStreamer

    class Pieces(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            pieces.append(text)
            say(text)

    pieces: list[str] = []
    tokenizer, model = speaker.tokenizer, speaker.model
    if chat:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", fix="leave --chat out")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].to(model.device)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not ids.shape[1]:
        raise UserError("the prompt has no tokens", fix="a prompt of at least one word")
    if longest and ids.shape[1] >= longest:
        raise UserError(
            f"the prompt has {ids.shape[1]:,} tokens, and the model's maximum is {longest:,}", fix="a shorter prompt"
        )
    room = max_tokens if not longest else min(max_tokens, longest - ids.shape[1])
    torch.manual_seed(seed)
    begin = time.perf_counter()
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            top_p=None,
            top_k=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            streamer=Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    return "".join(pieces), int(whole.shape[1] - ids.shape[1]), time.perf_counter() - begin
