"""Write an image's name into a run file, leaving every comment and every other letter as it is. Pure."""

from __future__ import annotations

import yaml

from windlass.errors import UserError


def pin(text: str, name: str) -> str:
    """The text of a run file with `image.name` set to `name`."""
    changed = _edit(text, name)
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(changed)
    expected = {**before, "image": {**(before.get("image") or {}), "name": name}}
    if after != expected:  # an edit of text is trusted only when it reads back as what was meant
        raise UserError("the run file cannot be edited without changing more than the image", fix=f"image.name={name}")
    return changed


def _edit(text: str, name: str) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return f"{text}image:\n  name: {name}\n"
    if not isinstance(root, yaml.MappingNode):
        raise UserError("the run file is no mapping of sections")
    section = _value(root, "image")
    if section is None:
        if root.flow_style:
            return _insert(text, root.start_mark.index + 1, f"image: {{name: {name!r}}}{', ' if root.value else ''}")
        end = "" if text.endswith("\n") else "\n"
        return f"{text}{end}image:\n  name: {name}\n"
    if not isinstance(section, yaml.MappingNode):  # `image:` alone
        return _replace(text, section, f" {{name: {name!r}}}" if section.value == "" else f"{{name: {name!r}}}")
    there = _value(section, "name")
    if there is not None:
        return _replace(text, there, repr(name) if section.flow_style else name)
    if section.flow_style:
        return _insert(text, section.start_mark.index + 1, f"name: {name!r}{', ' if section.value else ''}")
    margin = " " * section.start_mark.column
    return _insert(text, section.start_mark.index, f"name: {name}\n{margin}")


def _value(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    for name, value in mapping.value:
        if name.value == key:
            return value  # type: ignore[no-any-return]
    return None


def _replace(text: str, node: yaml.Node, new: str) -> str:
    return text[: node.start_mark.index] + new + text[node.end_mark.index :]


def _insert(text: str, at: int, new: str) -> str:
    return text[:at] + new + text[at:]
