"""A run file is read exactly or refused with words; never with a traceback."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from windlass.errors import ExitCode, UserError
from windlass.spec import Run, dump_run, load_run, parse_run

MINIMAL: dict[str, Any] = {"model": {"preset": "llama-tiny"}, "data": {}}


def write(folder: Path, text: str, name: str = "my run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def minimal(**sections: Any) -> dict[str, Any]:
    return {**MINIMAL, **sections}


def test_round_trip(tmp_path: Path) -> None:
    run = parse_run(
        {
            "name": "round-trip",
            "model": {"path": "/models/ünïcode", "config": {"rope_scaling": {"factor": 8.0}}, "init": "pretrained"},
            "data": {"source": "hf:json", "files": ["a.jsonl", "b.jsonl"], "sequence_length": 128},
            "train": {"learning_rate": 3e-4, "epsilon": 1e-8, "min_learning_rate": 0, "schedule": "wsd"},
            "checkpoint": {"keep_every": 100},
        }
    )
    assert load_run(write(tmp_path, dump_run(run))) == run


def test_the_file_names_the_run(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL)
    assert load_run(write(tmp_path, text)).name == "my-run"
    assert load_run(write(tmp_path, text), ["name=other"]).name == "other"


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("3E-4", 3e-4), ("1e-3", 1e-3), (".5", 0.5), ("5.", 5.0), ("1.5e+3", 1500.0), ("2", 2.0)],
)
def test_numbers_as_people_write_them(text: str, value: float, tmp_path: Path) -> None:
    path = write(tmp_path, f"model: {{preset: llama-tiny}}\ndata: {{}}\ntrain:\n  learning_rate: {text}\n")
    assert load_run(path).train.learning_rate == value
    assert load_run(path, [f"train.learning_rate={text}"]).train.learning_rate == value


def test_words_that_look_a_little_like_numbers_stay_words(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: e5, revision: 1e5x}\ndata: {source: 12e}\n")
    run = load_run(path)
    assert (run.model.path, run.model.revision, run.data.source) == ("e5", "1e5x", "12e")


def test_empty_sections_mean_their_defaults(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, "model: {preset: llama-tiny}\ndata:\ntrain:\nparallel:\n"))
    assert run.train == Run.model_fields["train"].default


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(minimal(train={"steps": 5})))
    run = load_run(
        path,
        [
            "train.steps=200",
            "nodes=4",
            "model.config.num_hidden_layers=3",
            "model.config.rope_scaling={factor: 2e0}",
            "data.files=[a, b]",
            "parallel.cpu_offload=true",
            "data.validation_source=null",
            "data.source=*.jsonl",  # to YAML alone a reference to nothing
        ],
    )
    assert (run.train.steps, run.resources.nodes) == (200, 4)
    assert run.model.config == {"num_hidden_layers": 3, "rope_scaling": {"factor": 2.0}}
    assert run.data.files == ("a", "b")
    assert run.parallel.cpu_offload is True
    assert run.data.validation_source is None
    assert run.data.source == "*.jsonl"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "not of the form section.key=value"),
        ("=5", "not of the form"),
        ("stepps=5", "did you mean train.steps?"),
        ("train.stepps=5", "did you mean train.steps?"),
        ("config=x", "could mean model.config, data.config"),
        ("train.steps.more=5", "goes below 'steps'"),
        ("train.steps=[", "not valid YAML"),
        ("train.steps=0", "train.steps: input should be greater than 0, not 0"),
        ("train.steps=many", "train.steps must be a whole number"),
        ("train=5", "train is a section"),
    ],
)
def test_overrides_that_cannot_be(override: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(minimal(train={"steps": 5})))
    with pytest.raises(UserError) as refused:
        load_run(path, [override])
    assert said in str(refused.value)
    assert refused.value.exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (minimal(trian={}), "unknown key trian; did you mean train?"),
        (minimal(train={"learning_rat": 1}), "unknown key train.learning_rat; did you mean train.learning_rate?"),
        (minimal(train={"sharding": "full"}), "unknown key train.sharding; did you mean parallel.sharding?"),
        (minimal(train={"xyzzyx": 1}), "unknown key train.xyzzyx"),
        ({"data": {}}, "model is missing"),
        ({"data": {}}, "model.preset=llama3.2-1b"),  # the fix
        ({"model": {}, "data": {}}, "give either model.preset or model.path"),
        (minimal(model={"preset": "a", "path": "b"}), "not both"),
        (minimal(data={"holdout": 0.1, "validation_source": "x"}), "not both"),
        (minimal(data={"holdout": 0.9}), "data.holdout"),
        (minimal(train={"steps": 5, "warmup_steps": 6}), "train.warmup_steps is 6 but the run has only 5 steps"),
        (minimal(train={"learning_rate": 1e-4, "min_learning_rate": 1e-3}), "above the peak"),
        (minimal(train={"learning_rate": float("nan")}), "train.learning_rate"),
        (minimal(train={"learning_rate": float("inf")}), "train.learning_rate"),
        (minimal(train={"beta2": 1.5}), "train.beta2"),
        (minimal(train={"precision": "fp16"}), "train.precision"),
        (minimal(data={"sequence_length": 1}), "data.sequence_length"),
        (minimal(resources={"gpus_per_node": 8, "processes_per_node": 4}), "one rank per GPU"),
        (minimal(name="a/b"), "is not usable"),
        (minimal(name=".hidden"), "is not usable"),
        (minimal(name="x" * 64), "is not usable"),
        (minimal(checkpoint={"keep": 0}), "checkpoint.keep"),
        (minimal(target={"port": 70000}), "target.port"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_run(values)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        minimal(train={"steps": 100, "warmup_steps": 600}),
        minimal(train={"learning_rate": 1e-4, "min_learning_rate": 1e-3}),
        minimal(train={"early_stopping": {}}),
        minimal(train={"objective": "dpo", "fused_head": True}),
        minimal(model={"preset": "llama-tiny", "path": "b"}),
        minimal(model={}),
        minimal(model={"preset": "llama-tiny", "lora": {}}),
        minimal(data={"holdout": 0.1, "validation_source": "x"}),
        minimal(data={"source": "x", "sources": [{"source": "y"}]}),
        minimal(data={"special_tokens": ["<a>", "", "<a>"]}),
        minimal(resources={"gpus_per_node": 8, "processes_per_node": 4}),
        minimal(checkpoint={"export": True, "at_end": False}),
        minimal(checkpoint={"direct": True}),
        minimal(checkpoint={"local_every": 5}),
        minimal(target={"host": "login"}),
        minimal(target={"kubernetes": {"job": "job", "runtime": "mine"}}),
        minimal(image={"dockerfile": "Dockerfile", "torch": "2.14.1"}),
        minimal(notify={"webhook": "HOOK", "smtp_user": "me"}),
    ],
)
def test_what_mends_keys_that_do_not_go_together_mends_them(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        parse_run(values)
    setting = (refused.value.fix or "").split("    ")[0]
    path = write(tmp_path, yaml.safe_dump(values, sort_keys=False))
    assert load_run(path, [setting])
    key, _, value = setting.partition("=")
    with pytest.raises(UserError) as in_file:
        load_run(path)
    last = key.rpartition(".")[2]
    if f"{last}:" in path.read_text():  # the file has the key: its line is named
        assert f"{path}, line " in in_file.value.fix
        assert f": {last}: {value}" in in_file.value.fix
    else:
        assert in_file.value.fix.startswith(setting)


def test_keys_that_an_override_brought_together_are_not_the_files_fault(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(minimal(train={"steps": 2000, "warmup_steps": 100})))
    with pytest.raises(UserError) as refused:
        load_run(path, ["train.steps=60"])
    assert refused.value.what == "train.warmup_steps is 100 but the run has only 60 steps"
    assert refused.value.fix == "train.warmup_steps=1    a fiftieth of the steps, as by default"


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UserError) as refused:
        parse_run(minimal(train={"steps": 0, "lr": 1}, data={"holdout": 2}), source="run.yaml")
    assert "run.yaml has 3 mistakes" in refused.value.what
    assert len((refused.value.evidence or "").splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "said"), [("", "holds no run"), ("[1, 2]", "holds no run"), ("a: [", "not valid YAML"), ("\x00", "YAML")]
)
def test_files_that_are_no_runs(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_run(write(tmp_path, text))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path, "", "llama.yaml")
    with pytest.raises(UserError) as refused:
        load_run(tmp_path / "lama.yaml")
    assert "llama.yaml" in (refused.value.fix or "")
    for name, fix in {
        "llama": f"the same command with {tmp_path / 'llama.yaml'}",  # a run's name; `plan` shall not become `run`
        "c2.yaml": f"windlass init {tmp_path / 'c2.yaml'}",  # .yaml alone is no likeness
        "train.steps=3": "windlass run RUN.yaml train.steps=3",
        "none/dpo.yaml": "windlass init dpo.yaml",
    }.items():
        with pytest.raises(UserError) as refused:
            load_run(tmp_path / name if "=" not in name else name)
        assert refused.value.fix == fix
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path / "binary.yaml")


SECTIONS = {
    name: field.annotation
    for name, field in Run.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["full", "1e3", ""])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
)
sections = st.fixed_dictionaries(
    {},
    optional={
        name: st.dictionaries(st.sampled_from([*model.model_fields, "typo"]), scalars | anything, max_size=5) | anything
        for name, model in SECTIONS.items()
    },
)


@pytest.mark.slow
@given(values=sections)
@example(values={"model": {"preset": "llama-tiny"}, "data": {"files": None}})
def test_any_values_make_a_run_or_a_user_error(values: dict[str, Any]) -> None:
    try:
        run = parse_run({"model": {"preset": "llama-tiny"}, "data": {}, **values})
    except UserError:
        return
    assert parse_run(yaml.safe_load(dump_run(run))) == run


@given(text=st.text(max_size=200))
def test_any_text_is_a_run_or_a_user_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError):
        load_run(path)


@given(override=st.text(max_size=40) | st.from_regex(r"(train|model|data)\.[a-z_.]{1,12}=.{0,10}", fullmatch=True))
def test_any_override_is_taken_or_a_user_error(override: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "base.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    with contextlib.suppress(UserError):
        load_run(path, [override])


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {preset: llama-tiny}\ndata: {}\ntrain:\n  steps: 5\ntrain:\n  seed: 1\n")
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert "line 5, column 1: the key 'train' stands here again; it is in line 3 already" in str(caught.value)
    write(tmp_path, "model: {preset: llama-tiny}\ndata: {source: a, source: b}\n")
    with pytest.raises(UserError, match="not valid YAML"):
        load_run(path)


def test_anchors_and_merges_are_no_duplicates(tmp_path: Path) -> None:
    text = "model: &m {preset: llama-tiny}\ndata: {}\ntrain: &t {steps: 5}\n"
    assert load_run(write(tmp_path, text)).train.steps == 5


def test_a_yaml_mistake_names_the_file_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {preset: llama-tiny\ndata: {}\n", name="broken.yaml")
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert f"{path}, line 2" in str(caught.value)
    assert "<unicode string>" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr=3", "did you mean train.learning_rate?"),
        ("train.lr=3", "did you mean train.learning_rate?"),
        ("batch_size=8", "did you mean train.global_batch?"),
        ("model=5", "model is a section with keys of its own, not 5"),
        ("train.steps=x", "train.steps must be a whole number, not 'x'"),
        ("train.learning_rate=fast", "train.learning_rate must be a number, not 'fast'"),
        ("train.precision=fp64", "train.precision must be 'bf16' or 'fp32', not 'fp64'"),
        ("data.shuffle=perhaps", "data.shuffle must be true or false, not 'perhaps'"),
    ],
)
def test_mistakes_are_told_in_the_words_of_run_files(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_run(write(tmp_path, yaml.safe_dump(MINIMAL)), [override])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("train.steps=abc", "train.steps=1000    (its default; windlass schema --keys explains every key)"),
        ("train.steps=true", "train.steps=1000"),
        ("train.learning_rate=fast", "train.learning_rate=0.0003"),
        ("train.step=10", "train.steps=10"),
        ("train.lr=1e-4", "train.learning_rate=0.0001"),
        ("parallel.pipeline=2", "windlass schema --keys"),
        ("train.precision=fp61", "train.precision=fp32"),
        ("parallel.sharding=fsdp", "parallel.sharding=full"),
        ("target.kind=kubernets", "target.kind=kubernetes    or --on kubernetes"),
        ("target.kind=k8s", "target.kind=kubernetes    or --on kubernetes"),
        ("model.lora.rank=0", "windlass schema --keys"),
    ],
)
def test_a_mistake_in_an_override_has_a_fix_and_does_not_blame_the_file(
    override: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        load_run(write(tmp_path, yaml.safe_dump(MINIMAL)), [override])
    assert (caught.value.fix or "").startswith(fix)
    assert ".yaml" not in caught.value.what


def test_a_mistake_in_the_file_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.yaml: train\.steps must be a whole number"):
        load_run(write(tmp_path, yaml.safe_dump(minimal(train={"steps": "abc"}))), ["train.seed=1"])


HEAD = "model:\n  preset: llama-tiny\ndata: {}\n"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("train:\n  steps: 5\n  learning_rat: 1e-4\n", "line 6: learning_rate: 0.0001"),
        ("train: {compil: true}\n", "line 4: compile: true"),
        ("train:\n  sharding: full\n", "line 5: put it below `parallel:`, as sharding: full"),
        ("sharding: full\n", "line 4: put it below `parallel:`, as sharding: full"),
        ("trian:\n  steps: 5\n", "line 4: train:"),
        ("train:\n  early_stoping:\n    patience: 2\n", "line 5: early_stopping:"),
        ("train:\n  xyzzyx: 1\n", "line 5: windlass schema --keys    lists every key"),
        ("train:\n  # a remark\n  steps: abc\n", "line 6: steps: 1000    (its default; windlass schema --keys"),
        ("train:\n  precision: fp61\n", "line 5: precision: fp32"),
        ("target:\n  kind: k8s\n", "line 5: kind: kubernetes    or --on kubernetes"),
        ("train:\n  steps:200\n", "line 5: a space after the colon: steps: 200"),
        ("target:\n  kubernetes:\n    job:trainjob\n", "line 6: a space after the colon: job: trainjob"),
    ],
)
def test_a_mistake_in_the_file_is_mended_in_its_line(text: str, fix: str, tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + text)
    with pytest.raises(UserError) as caught:
        load_run(path, ["train.seed=1"] if "train:\n  steps:200" not in text else [])
    assert (caught.value.fix or "").startswith(f"{path}, {fix}")


def test_several_mistakes_in_the_file_are_mended_line_by_line(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "train:\n  stepps: 5\n  lr: 1\n")
    with pytest.raises(UserError) as caught:
        load_run(path, ["train.precision=fp61"])
    assert caught.value.fix == f"train.precision=fp32\n{path}, line 5: steps: 5\n{path}, line 6: learning_rate: 1"


def test_a_mistake_in_a_pipe_is_told_without_its_line() -> None:
    """`windlass plan <(…)`: what was read cannot be read again."""
    reading, writing = os.pipe()
    os.write(writing, f"{HEAD}train: {{stepps: 5}}\n".encode())
    os.close(writing)
    with pytest.raises(UserError) as caught:
        load_run(f"/dev/fd/{reading}")
    os.close(reading)
    assert caught.value.fix == "train.steps=5"


def test_a_mistake_beyond_the_list_of_the_file_is_the_override_s(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {preset: llama-tiny}\ndata: {sources: [{source: corpus:austen}]}\n")
    with pytest.raises(UserError, match="has 2 mistakes"):
        load_run(path, ["data.sources=[{source: corpus:austen}, {sorce: 1}]"])


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("train:\n\tsteps: 5\n", 5, "spaces, not tabs"),
        ("train:\n  steps: 5\n\n  seed: 1\n \tbeta1: 1\n", 8, "spaces, not tabs"),
        ("name: a: b\n", 4, 'quotes around a value with a colon in it: name: "a: b"'),
        ("train:\n  steps: 5\n   seed: 1\n", 6, "the same column"),
        ("train:\n  steps: 5\n seed: 1\n", 6, "the same column"),
        ("train:\n  steps: 5\n  seed\n", 7, "a colon and a space after every key"),
        ("name: 'abc\n", 5, "the quotation mark that closes it"),
        ("data: {files: [a, b}\n", 4, "close every bracket"),
        ("name: @abc\n", 4, "quotes around"),
        ("train:\n  steps: 5\ntrain: {}\n", 6, "keep one of the two"),
        ("name: 2026-13-01\n", None, "quotes around"),
    ],
)
def test_broken_yaml_says_what_usually_mends_it(text: str, line: int | None, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + text, name="broken.yaml")
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert caught.value.what == f"{path} is not valid YAML"
    where = f"{path}, line {line}" if line else str(path)
    assert (caught.value.fix or "").startswith(where)
    assert words in (caught.value.fix or "")
    assert line is None or f"{path}, line {line}, column" in (caught.value.evidence or "")


def test_an_override_that_is_no_yaml_has_a_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_run(write(tmp_path, yaml.safe_dump(MINIMAL)), ["data.source=[a"])
    assert caught.value.fix == "'data.source=\"[a\"'    with quotes inside those of the shell"


@pytest.mark.parametrize("text", ["", "[1, 2]", "steps:200"])
def test_a_file_without_a_run_has_a_fix(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text, name="empty.yaml")
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert caught.value.fix == f"windlass init {path} --force    writes one to start from"


def test_paths_of_a_run_file_lie_beside_it_and_those_of_overrides_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    for name in ("texts", "tok", "models/own", "src"):
        (project / name).mkdir(parents=True)
    (project / "texts" / "a.jsonl").touch()
    (project / "token.txt").touch()
    (tmp_path / "texts").mkdir()
    text = (
        "model: {path: models/own, init: pretrained, lora: {adapter: not-here}}\n"
        "data: {sources: [{source: 'texts/*.jsonl'}, {source: 'hf:texts'}], validation_source: texts, tokenizer: tok}\n"
        "target: {kubernetes: {code: src, secrets: [HF_TOKEN=file:token.txt, WANDB_API_KEY]}}\n"
        "image: {context: src}\n"
    )
    path = write(project, text)
    monkeypatch.chdir(tmp_path)
    for spelling in (path, Path("project") / path.name):
        run = load_run(spelling)
        assert run.model.path == "project/models/own"
        assert run.model.lora is not None
        assert run.model.lora.adapter == "not-here"  # a hub id, for all that can be seen
        assert [one.source for one in run.data.sources] == ["project/texts/*.jsonl", "hf:texts"]
        assert run.data.validation_source == "project/texts"
        assert run.data.tokenizer == "project/tok"
        assert run.target.kubernetes.code == "project/src"
        assert run.target.kubernetes.secrets == ("HF_TOKEN=file:project/token.txt", "WANDB_API_KEY")
        assert run.image.context == "src"  # its readers join it to the run file's folder
    assert load_run(path, ["data.validation_source=texts"]).data.validation_source == "texts"
    assert load_run(path, ["image.context=texts"]).image.context == "../texts"
    assert load_run(path, saved=True).data.tokenizer == "tok"
    monkeypatch.chdir(project)
    assert load_run(path.name).data.tokenizer == "tok"
    monkeypatch.chdir("/")
    assert load_run(path).model.path == str(project / "models" / "own")


@pytest.mark.parametrize("value", ["2024-13-01", "[" * 1000], ids=["a 13th month", "brackets"])
def test_what_yaml_cannot_build_is_a_mistake_in_words(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {value}\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_run(path)
    path.write_text("model: {preset: llama-tiny}\ndata: {source: x}\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_run(path, [f"train.steps={value}"])
