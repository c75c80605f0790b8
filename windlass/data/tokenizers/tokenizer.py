"""Load a tokenizer by name, and turn documents into token ids by one stated rule.

A document becomes PREFIX + its tokens + one EOS. PREFIX is what the post-processor in tokenizer.json puts before a text
(a BOS for Llama and Mistral, nothing for GPT-2), except that `add_bos_token` in tokenizer_config.json, where present,
decides about the BOS. What the post-processor would put after a text is left out, so that there is exactly one EOS.
Special tokens spelt out in a text are read as those tokens, as transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.common.files import json_digest
from windlass.common.hub import fetch
from windlass.data.sources.source import assets, nearest
from windlass.data.tokenizers.chunking import ChunkEncoder, chunk_encoder
from windlass.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TINY = "tiny"
SHARD_TOKENIZER = "tokenizer"  # folder beside the shards that it made
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
# Where a folder may name its EOS and BOS, in the order they are believed.
SIDE_FILES = (CONFIG_FILE, "special_tokens_map.json", "generation_config.json", "config.json")
TEMPLATE_FILE = "chat_template.jinja"  # where newer folders keep what tokenizer_config.json held before
TOKENIZER_FILES = (TOKENIZER_FILE, *SIDE_FILES, TEMPLATE_FILE)


@dataclass(frozen=True)
class Tokenizer:
    """A fast tokenizer with its end-of-document token."""

    name: str
    definition: str  # the text of tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    bos_token: str | None
    eos_token: str | None

    marks_loss = False  # whether the top bit of a token says that it is trained on

    @property
    def dtype(self) -> str:
        """The type that shards hold its tokens in."""
        return "uint32" if self.marks_loss else dtype_for(self.vocab_size)

    @cached_property
    def _fast(self) -> Any:
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_str(self.definition)
        fast.no_truncation()
        fast.no_padding()
        return fast

    @cached_property
    def _chunks(self) -> ChunkEncoder | None:
        return chunk_encoder(self._fast, self.definition)

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids a model needs: the largest id and one."""
        return 1 + int(max(self._fast.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def eos_id(self) -> int | None:
        return None if self.eos_token is None else self._id_of(self.eos_token)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What stands before every document."""
        plain = self._fast.encode("a", add_special_tokens=False).ids
        marked = self._fast.encode("a", add_special_tokens=True).ids
        before = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        prefix = marked[:before]
        wanted = self.config.get("add_bos_token")
        if self.bos_token is not None and isinstance(wanted, bool):
            bos = self._id_of(self.bos_token)
            prefix = [bos] * wanted + [token for token in prefix if token != bos]
        return tuple(prefix)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids: a digest of the definition, the prefix and the EOS."""
        definition = json.loads(self.definition)
        for setting in ("truncation", "padding"):  # not used here
            definition.pop(setting, None)
        return json_digest([definition, self.prefix, self.eos_id])

    @property
    def chat_templates(self) -> dict[str, str]:
        """The templates that turn messages into a text, by name; where there is but one, `default`."""
        given = self.config.get("chat_template")
        entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
        named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
        return {name: template for name, template in named.items() if isinstance(template, str)}

    def with_added(self, tokens: Sequence[str]) -> Tokenizer:
        """This tokenizer with special tokens added; those it has already stay what they are."""
        if not tokens:
            return self
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_str(self.definition)
        fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        return replace(self, definition=fast.to_str())

    def ids_of_added(self, tokens: Sequence[str]) -> tuple[int, int]:
        """The ids [first, end) of added tokens."""
        ids = sorted(self._id_of(token) for token in tokens)
        if ids != list(range(ids[0], ids[0] + len(ids))):
            raise UserError(
                f"the ids of data.special_tokens in the tokenizer {self.name} do not follow one another",
                evidence=", ".join(f"{token} {self._id_of(token)}" for token in tokens),
                cause="some of them were in the tokenizer before and others were not",
                fix="data.special_tokens=[…] with the new ones only",
            )
        return ids[0], ids[-1] + 1

    def _id_of(self, token: str) -> int:
        number = self._fast.token_to_id(token)
        if number is None:
            raise UserError(f"the tokenizer {self.name} names the token {token!r}, which is not in its vocabulary")
        return int(number)

    def require_eos(self) -> int:
        if self.eos_id is None:
            raise UserError(
                f"the tokenizer {self.name} names no end token, and documents must end with one",
                evidence=f"no eos_token in {', '.join(SIDE_FILES)}",
                fix=f'put {{"eos_token": "…"}} into {CONFIG_FILE} beside {TOKENIZER_FILE}',
            )
        return self.eos_id

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each document, its prefix and its EOS included."""
        prefix, end = list(self.prefix), [self.require_eos()]
        return [prefix + ids + end for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._chunks:
            return self._chunks.encode(texts)
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The same as arrays."""
        import numpy as np

        return [np.array(ids, dtype=np.int64) for ids in self.encode_documents(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._fast.decode([int(token) for token in ids], skip_special_tokens=False))

    def save(self, folder: Path | str) -> None:
        """Write a folder that this module and `transformers.AutoTokenizer` load."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(self.definition, encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        for key, token in (("bos_token", self.bos_token), ("eos_token", self.eos_token)):
            if token is not None:
                config.setdefault(key, token)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `tiny`, in a folder or tokenizer.json here, or of a hub id."""
    if name == TINY:
        return from_folder(assets() / "tiny-tokenizer", name)
    path = Path(name).expanduser()
    if path.is_dir():
        return from_folder(path, name)
    if path.is_file():
        if path.suffix != ".json":
            raise UserError(
                f"{name} is not a tokenizer",
                cause=f"a folder or a {TOKENIZER_FILE} is expected",
                fix="data.tokenizer=FOLDER    or a hub id",
            )
        return from_files(name, path, [path.with_name(side) for side in SIDE_FILES])
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/")):
        raise UserError(
            f"there is no tokenizer {name}",
            evidence=nearest(path),
            cause=f"a folder with {TOKENIZER_FILE}, a hub id OWNER/NAME, or {TINY} is expected",
            fix=f"data.tokenizer={TINY}",
        )
    return from_hub(name)


def from_folder(folder: Path, name: str) -> Tokenizer:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(
            f"the folder {folder} holds no {TOKENIZER_FILE}",
            evidence=f"it holds {', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}",
            cause="only fast tokenizers are read",
            fix=f"AutoTokenizer.from_pretrained(…).save_pretrained({str(folder)!r})    writes one",
        )
    return from_files(name, path, [folder / side for side in SIDE_FILES])


def from_files(name: str, definition: Path, sides: Sequence[Path]) -> Tokenizer:
    values = [read_json(path) for path in sides if path.is_file()]
    config = next((read_json(path) for path in sides if path.name == CONFIG_FILE and path.is_file()), {})
    template = definition.with_name(TEMPLATE_FILE)
    if template.is_file():
        config = {**config, "chat_template": read_text(template)}
    tokenizer = Tokenizer(
        name=name,
        definition=read_text(definition),
        config=config,
        bos_token=special_token("bos", values, definition),
        eos_token=special_token("eos", values, definition),
    )
    try:
        tokenizer._fast  # noqa: B018  a bad file is an error here, not in the middle of a run
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{definition} is not a tokenizer", evidence=str(error)) from None
    return tokenizer


def special_token(kind: str, sides: Sequence[dict[str, Any]], definition: Path) -> str | None:
    """The BOS or EOS that the first side file names: by its text, or by its id."""
    for side in sides:
        token = side.get(f"{kind}_token")
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if isinstance(token, str):
            return token
        number = side.get(f"{kind}_token_id")
        if isinstance(number, list):  # several ends of a generation: the first one ends a document
            number = number[0] if number else None
        if isinstance(number, int):
            from tokenizers import Tokenizer as FastTokenizer

            text = FastTokenizer.from_file(str(definition)).id_to_token(number)
            if text is not None:
                return str(text)
    return None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read", evidence=str(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON", evidence=str(error)) from None
    return value if isinstance(value, dict) else {}


def from_hub(name: str) -> Tokenizer:
    folder = fetch(name, TOKENIZER_FILES, what="tokenizer")
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{name} on the hub holds no {TOKENIZER_FILE}",
            cause="only fast tokenizers are read",
            fix="AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER), then data.tokenizer=FOLDER",
        )
    return from_folder(folder, name)
