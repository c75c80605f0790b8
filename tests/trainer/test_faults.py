"""Faults on demand: read strictly, met once."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.trainer.distributed.faults import Fault, Faults, parse_faults


def test_parsing() -> None:
    assert parse_faults("") == []
    assert parse_faults("kill:rank=1,step=60; term:step=6,point=save.written ;sleep:seconds=0.5;nan:") == [
        Fault("kill", 1, 60, "step.begin", 1.0, ".fault-0"),
        Fault("term", None, 6, "save.written", 1.0, ".fault-1"),
        Fault("sleep", None, None, "step.begin", 0.5, ".fault-2"),
        Fault("nan", None, None, "step.loss", 1.0, ".fault-3"),
    ]


@pytest.mark.parametrize(
    "text", ["explode:rank=1", "kill:rnk=1", "kill:point=nowhere", "kill:rank=one", "sleep:seconds=long", "kill:rank"]
)
def test_what_is_not_understood(text: str) -> None:
    with pytest.raises(UserError, match="is not understood"):
        parse_faults(text)


def test_a_fault_is_met_once_by_each_rank(tmp_path: Path) -> None:
    text = "nan:rank=1,step=3"
    assert not Faults(0, tmp_path, text).reach("step.loss", 3)
    assert not Faults(1, tmp_path, text).reach("step.loss", 2)
    assert not Faults(1, tmp_path, text).reach("step.end", 3)
    assert Faults(1, tmp_path, text).reach("step.loss", 3)
    assert not Faults(1, tmp_path, text).reach("step.loss", 3), "the attempt after it is left alone"


def test_without_any_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_FAULTS", raising=False)
    assert not Faults(0, tmp_path / "logs").reach("step.begin", 1)
    assert not (tmp_path / "logs").exists()
