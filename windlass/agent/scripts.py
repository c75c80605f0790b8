"""Functions as scripts: the flags are the parameters, the result is printed as JSON."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from windlass.errors import UserError

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def main(function: Callable[..., BaseModel], arguments: Sequence[str] | None = None) -> int:
    """Call a function with the flags of the command line. Its exit code is that of windlass's commands."""
    given = vars(parser_of(function).parse_args(arguments))
    given.pop("json")
    try:
        result = function(**given)
    except UserError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(result.model_dump_json(indent=2, by_alias=True))
    return 0


def parser_of(function: Callable[..., BaseModel]) -> argparse.ArgumentParser:
    """`--num_nodes 4` or `--num-nodes 4` for every parameter; a flag of a bool alone means true."""
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(function), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="(always so)")
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        options: dict[str, Any] = {"dest": name, "help": f"(default: {parameter.default})"}
        if parameter.default is inspect.Parameter.empty:
            options |= {"required": True, "help": None}
        else:
            options["default"] = parameter.default
        parser.add_argument(*flags, **options, **_kind_of(hints[name]))
    return parser


def _kind_of(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) in (Union, type(int | None)):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return {"type": _boolean, "nargs": "?", "const": True, "metavar": "true|false"}
    return {"type": hint, "metavar": hint.__name__.upper()}


def _boolean(text: str) -> bool:
    if text.lower() not in WORDS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return WORDS[text.lower()]
