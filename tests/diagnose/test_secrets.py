"""No secret leaves in a bundle, whatever its shape and wherever it stands; ordinary text stays as it is."""

# ruff: noqa: E501 (lines as programs print them)

from __future__ import annotations

import base64
import json
import string
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.diagnose.score import cases
from tests.diagnose.test_score import CASES
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.bundle import save_bundle
from windlass.diagnose.secrets import REMOVED, clean_text, without_secrets

LETTERS = string.ascii_letters + string.digits


def made(length, alphabet=LETTERS):
    """Random text with letters and digits, so that no ordinary word is one."""
    return st.text(alphabet, min_size=length, max_size=length).filter(lambda text: len(set(text)) > length // 3)


# Tokens that are known by their shape alone, wherever they stand.
SHAPED = st.one_of(
    made(34).map(lambda text: f"hf_{text}"),
    made(36).map(lambda text: f"ghp_{text}"),
    made(36).map(lambda text: f"gho_{text}"),
    made(60).map(lambda text: f"github_pat_{text}"),
    made(20).map(lambda text: f"glpat-{text}"),
    made(16, string.ascii_uppercase + string.digits).map(lambda text: f"AKIA{text}"),
    made(16, string.ascii_uppercase + string.digits).map(lambda text: f"ASIA{text}"),
    st.tuples(st.sampled_from("bpars"), made(24)).map(lambda pair: f"xox{pair[0]}-1234567890-{pair[1]}"),
    st.tuples(made(24), made(40), made(43)).map(lambda parts: f"eyJ{parts[0]}.eyJ{parts[1]}.{parts[2]}"),
    made(48).map(lambda text: f"sk-{text}"),
    made(64).map(lambda text: f"nvapi-{text}"),
    made(27).map(lambda text: f"dckr_pat_{text}"),
    made(35, LETTERS + "-_").map(lambda text: f"AIza{text}"),
)
# Values that only their names give away: W&B keys are plain hexadecimal, AWS' secret keys plain letters.
PLAIN = st.one_of(made(40, "0123456789abcdef"), made(40), made(12), made(16).map(lambda text: f"{text[:8]}-{text[8:]}"))
NAMED = (
    "WANDB_API_KEY={}", "export MY_SERVICE_TOKEN='{}'", "AWS_SECRET_ACCESS_KEY: {}", "--password {}", "--hf-token={}", "--api-key {}", "api_key = \"{}\"",
    "'DB_PASSWORD': '{}'", '"client_secret": "{}"', "https://user:{}@git.example.com/repo.git", "redis://:{}@cache:6379/0", "Authorization: Bearer {}", "authorization: Basic {}=",
    "machine api.wandb.ai login user password {}", "https://x.blob.core.windows.net/c?sv=1&sig={}&se=2", "https://b.s3.amazonaws.com/k?X-Amz-Signature={}&X-Amz-Date=1",
    "https://hooks.slack.com/services/T01/B02/{}", "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", '{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----\\n"}}',
    "os.environ['OPENAI_API_KEY'] = '{}'", "curl -H 'X-Api-Key: {}' http://x", "mlflow.set_tracking_token: {}", "PGPASSWORD={} psql -h db", "docker login -u me -p {}", "kubectl create secret generic s --from-literal=key={}",
    "mysql -uroot -p{} db", "sshpass -p {} ssh a@b", "curl -u bob:{} https://x", "curl --user bob:{} https://x", "postgresql://bob:p@{}@db/x", "DB_PASS={}", "MYSQL_PW={}", "LICENSE_KEY={}", '{{"private_key_id": "{}"}}',
    "SharedAccessSignature=sv=2020&sig={}", '"{{\\"api_key\\": \\"{}\\"}}"', "password: |\n  {}\n", 'secret_key = """{}"""', "['train.py', '--wandb-key', '{}']", '["train.py", "--hf_token", "{}"]', "TOKEN_B64={}", "the password is {}",
    "https://hooks.slack-gov.com/services/T01/B02/{}", "https://corp.webhook.office.com/webhookb2/{}", "https://api.telegram.org/bot123:{}/sendMessage", ".dockerconfigjson: {}", "hvs.AAAAAAAAAAAAAAAA{}", "glcbt-bbbbbbbbbbbbbbbb{}",
    "db.example.com:5432:train:bob:{}", "*:*:*:postgres:{}", "connects as bob:{}@db.example.com:5432/train", "broker=bob:{}@mq/jobs", "cannot open bob:{}@[fd00::1]:6379",
)  # fmt: skip


def contents(facts, path):
    save_bundle(facts, path)
    with tarfile.open(path) as archive:
        return "\n".join(archive.extractfile(member).read().decode() for member in archive)


def facts_with(secret, line):
    """A secret in the environment of a container, in a command line, an annotation, a history and two logs."""
    container = {
        "name": "pytorch",
        "env": [{"name": "HF_TOKEN", "value": secret}, {"name": "NCCL_DEBUG", "value": "INFO"}],
        "command": ["python", "train.py", "--token", secret],
        "args": ["sh", "-c", line],
    }
    return {
        "job": {"metadata": {"name": "x", "annotations": {"note": line}}, "spec": {"template": {"spec": {"containers": [container]}}}},
        "pods": [{"metadata": {"name": "x-0"}, "spec": {"containers": [container]}, "status": {"phase": "Failed", "message": line}}],
        "events": [{"reason": "Failed", "message": line, "involvedObject": {"kind": "Pod", "name": "x-0"}}],
        "slurm": {"scontrol": f"JobId=1 JobState=FAILED Comment={line.replace(chr(10), ' ')}"},
        "logs": {"rank0": f"step 1 loss 2.0\n{line}\nthe token was {secret}\nbye", "rank1": f"INFO {line} done"},
    }  # fmt: skip


SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(
    secret=SHAPED,
    around=st.sampled_from(("{}", "using {} for the hub", "token='{}',", "url?x={}&y=1", "[{}]", "a\t{}\tb")),
)
def test_a_token_is_known_by_its_shape(secret, around, tmp_path):
    assert secret not in clean_text(around.format(secret))
    assert secret not in contents(facts_with("unrelated-word-1", around.format(secret)), tmp_path / "b.tar")


@SETTINGS
@given(secret=PLAIN, shape=st.sampled_from(NAMED))
def test_a_secret_is_known_by_its_name(secret, shape, tmp_path):
    assert secret not in clean_text(shape.format(secret)), shape
    text = contents(facts_with(secret, shape.format(secret)), tmp_path / "b.tar")
    assert secret not in text, shape
    assert "NCCL_DEBUG" in text
    assert "step 1 loss 2.0" in text


@pytest.mark.parametrize("shape", NAMED)
def test_every_shape(shape):
    secret = "q7Zk2mXv9RtB4wLs"
    assert secret not in clean_text(shape.format(secret))


def test_registry_credentials_and_secret_objects(tmp_path):
    auth = base64.b64encode(b"me:q7Zk2mXv9RtB4wLs").decode()
    config = {"auths": {"registry.example.com": {"username": "me", "password": "q7Zk2mXv9RtB4wLs", "auth": auth}}}
    encoded = base64.b64encode(json.dumps(config).encode()).decode()
    facts = {
        "job": [{"kind": "Secret", "metadata": {"name": "pull"}, "data": {".dockerconfigjson": encoded}}, config],
        "logs": {"rank0": f"config {json.dumps(config)}\n{encoded}"},
    }
    text = contents(facts, tmp_path / "b.tar")
    assert not any(secret in text for secret in (auth, encoded, "q7Zk2mXv9RtB4wLs"))


@pytest.mark.slow
def test_ordinary_logs_stay_as_they_are_and_mean_the_same():
    """The logs of the field hold no secrets: next to nothing of them may be removed, and every verdict stays."""
    lines = changed = 0
    for name, case in cases(CASES):
        cleaned = without_secrets(case["facts"])
        for key, text in (case["facts"].get("logs") or {}).items():
            before, after = (
                ("\n".join(log) if isinstance(log, list) else log).splitlines() for log in (text, cleaned["logs"][key])
            )
            lines += len(before)
            changed += sum(item != other for item, other in zip(before, after, strict=True))
        assert diagnose(Facts.read(cleaned)).name == diagnose(Facts.read(case["facts"])).name, name
    assert lines > 1500
    assert changed / lines < 0.01


@pytest.mark.parametrize("text", [
    "step=10 tokens=4096 tok/s=900", "max_tokens: 4096", "bos_token: <s>", "tokenizer: gpt2", "KeyError: 'text'", "author: jane", "pad_token_id = 0",
    "Loading tokenizer from /models/x", "num_key_value_heads: 8", "key=value", "primary_key: 3", "the secret of a good run is patience", "password authentication is off", "basic training finished",
    "AssertionError: token ids must be below vocab_size", "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json", "ssh-keygen is not installed", "signature of forward() changed",
    "ran for 600029 milliseconds", "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "commit 3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "tokens_per_second: 1234", "cookie monster dataset",
    "nvcr.io/nvidia/pytorch:24.05-py3@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "mailto:jane.doe@example.com", "Author:jane.doe@example.com", "git@github.com:org/repo.git", "ssh bob@node-1:22",
    "12:30:45@node-1:22", "rank:0@node-1:29500", "2001:db8:1234:5678:9abc:def0:1234:5678", "02:42:ac:11:00:02", "train.py:120:5:error:unused", "train.py:1200: in <module>", "arn:aws:iam::123456789012:role/train", "image:v1@registry.example.com/train",
    "fe80::42:acff:fe11:2", "src/model.py:1024:4:E501", "pip install torch@https://example.com/torch.whl", "tcp:host:29500:0:1", "2026-11-16T12:30:45:123:abc", "GPU:0000:3b:00:0", "0:1024:a:b:c1d2e3",
])  # fmt: skip
def test_ordinary_words_are_not_removed(text):
    assert REMOVED not in clean_text(text)
