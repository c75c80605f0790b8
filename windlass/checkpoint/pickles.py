"""Read torch DCP's `.metadata` without running what somebody planted in it. No torch is needed to prove one.

DCP describes the tensors of a checkpoint in a pickle, and a pickle can call anything. Only the classes that DCP needs
for tensors are let through. `BytesStorageMetadata` is not among them: DCP unpickles what it points to freely.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from windlass.checkpoint.manifest import is_plain_file_name

DTYPES = (
    *(
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)
METADATA = "torch.distributed.checkpoint.metadata"
MEMORY_FORMAT = (METADATA, "_MEM_FORMAT_ENCODING")
GETATTR = ("builtins", "getattr")  # how early Python 3.11 pickles a member of an enumeration
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
FILE_ATTRIBUTES = frozenset(("relative_path", "transform_descriptors"))  # of a `_StorageInfo`
ALLOWED = frozenset(
    [
        *((METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "MetadataIndex")),
        *((METADATA, name) for name in ("ChunkStorageMetadata", "StorageMeta")),
        MEMORY_FORMAT,
        STORAGE_INFO,
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        *(("torch", name) for name in DTYPES),
    ]
)


class UnsafePickleError(ValueError):
    """A pickle that would do more than describe tensors."""


def pickle_problem(path: Path) -> str | None:
    """What is wrong with a `.metadata` file, in words; None if it only describes tensors in files beside it."""
    try:
        check_pickle(path.read_bytes())
    except UnsafePickleError as error:
        return str(error)
    return None


def check_pickle(data: bytes) -> None:
    """Go through a pickle with stand-ins for every class, which do nothing; UnsafePickleError if it wants another.

    Afterwards the very same bytes may be read with the real classes: a state is set on instances of them alone, never
    on a class.
    """
    stand_ins: dict[tuple[str, str], type] = {}

    def find(module: str, name: str) -> type:
        if (module, name) not in stand_ins:
            base = _StorageInfo if (module, name) == STORAGE_INFO else _StandIn
            stand_ins[module, name] = _Sealed(name, (base,), {})
        return stand_ins[module, name]

    _load(data, find)


def load_pickle(data: bytes) -> Any:
    """The object in a pickle of DCP's own classes; UnsafePickleError for any other."""
    check_pickle(data)
    return _load(data, lambda module, name: getattr(importlib.import_module(module), name))


def _load(data: bytes, find: Callable[[str, str], Any]) -> Any:
    try:
        return _Unpickler(data, find).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # damaged pickles raise errors of every kind
        raise UnsafePickleError(f"it is not DCP's description of tensors: {type(error).__name__}: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, find: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == GETATTR:
            return self._member_of_memory_format
        if (module, name) not in ALLOWED:
            raise UnsafePickleError(
                f"it would run {module}.{name}, which no description of tensors needs: do not load it"
            )
        return self._find(module, name)

    def _member_of_memory_format(self, enumeration: Any, name: Any) -> Any:
        if enumeration is not self._find(*MEMORY_FORMAT) or not str(name).startswith("TORCH_"):
            raise UnsafePickleError("it would look into objects with builtins.getattr: do not load it")
        return getattr(enumeration, name, None)


class _Sealed(type):
    """A class that a pickle cannot change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickleError(f"it would change the class {cls.__name__}: do not load it")


class _StandIn(metaclass=_Sealed):
    def __new__(cls, *args: Any, **options: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        """DCP reads where a tensor's bytes are from any object that says so: none but `_StorageInfo` may."""
        values = state if isinstance(state, tuple) else (state,)
        named = {str(key) for value in values if isinstance(value, dict) for key in value}
        if named & FILE_ATTRIBUTES or any(name.startswith("__") for name in named):
            raise UnsafePickleError("it names files outside of its folder: do not load it")


class _StorageInfo(_StandIn):
    """Where a tensor's bytes are: in a file of the checkpoint's folder, as they are."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if args or options:
            raise UnsafePickleError("it describes files in an unknown way")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or not is_plain_file_name(state.get("relative_path")):
            raise UnsafePickleError("it names files outside of its folder: do not load it")
        if state.get("transform_descriptors"):
            raise UnsafePickleError("its files are transformed in a way that windlass does not use")
