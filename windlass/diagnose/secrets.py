"""Remove secrets from a bundle before it leaves the machine: from environments, command lines and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REMOVED = "[removed]"
SHORTEST = 6  # characters of a value that is searched for elsewhere; shorter ones would hit ordinary words

# A name that ends so holds a secret; bos_token, max_tokens and tokenizer do not.
NAME = (
    r"(?<![A-Za-z0-9_])(?!(?:bos|eos|pad|unk|sep|cls|mask|image|special|next|stop|per)_token)[\w.\-]{0,80}?"
    r"(?:token|secret|passw(?:or)?d|passwd|passphrase|pwd|[_-]pass|[_-]pw|api[_-]?key|apikey"
    r"|(?:access|private)[_-]?key(?:[_-]?id)?|(?:secret|account|encryption|license|signing|service|ssh|wandb)[_-]?key"
    r"|credentials?|auth|authorization|signature|sas|webhook(?:[_-]?url)?|dsn|cookie|dockerconfigjson|dockercfg)"
    r"(?:[_-](?:b64|base64|value))?"
)
SECRET_NAME = re.compile(rf"{NAME}\Z", re.IGNORECASE)
VALUE = r"\"{3}.*?\"{3}|\\+[\"'][^\"'\\\n]*\\+[\"']|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[^\s\"',;&|)}\]]+"
PROSE = r"(?:secret|configmap|timed|failed|missing|not|references)\b"  # volume "my-token" : secret "late" not found
PATTERNS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY( BLOCK)?-----|\Z)"),
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,}"),
    re.compile(r"\b(?:ghp|gho|ghu|ghs|ghr|github_pat|glpat|gldt|pypi|npm|dckr_pat|nvapi|sk|pk|rk|dop_v1"
            r"|wandb_v1)[-_][A-Za-z0-9_\-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{8,}"),
    re.compile(r"\bya29\.[\w\-.]{16,}|\bAIza[\w\-]{30,}"),
    re.compile(r"\beyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?"),
    re.compile(r"\b(?:IQoJ|FwoG|FQoG|AQoD)[\w+/=]{40,}"),
    re.compile(r"\bhvs\.[\w\-]{16,}|\bglcbt-[\w\-]{16,}|\br8_\w{16,}|\bdapi[0-9a-f]{32}|\bSG\.[\w\-]{16,}\.[\w\-]{16,}"),
    re.compile(r"\beyJhdXRocyI6[\w+/=]*"),  # a docker configuration in base64
    re.compile(r"https://hooks\.slack[\w-]*\.com/\S+|https://discord(?:app)?\.com/api/webhooks/\S+"
            r"|https://[\w.-]+\.webhook\.office\.com/\S+|https://[\w.-]+\.logic\.azure\.com\S+"
            r"|https://api\.telegram\.org/bot[^/\s]+"),
)  # fmt: skip
BEARER = re.compile(r"(\b(?:bearer|basic|digest|token)\s+)([A-Za-z0-9+/=._~\-]{12,})", re.IGNORECASE)
HEADER = re.compile(r"((?:proxy-)?authorization\"?'?\s*[:=]\s*\"?'?)([^\r\n\"']+)", re.IGNORECASE)
IN_URL = re.compile(r"(\b[a-z][a-z0-9+.\-]{1,20}://)([^\s/\"']{1,400})@", re.IGNORECASE)
SIGNED = re.compile(
    r"([?&](?:X-Amz-(?:Signature|Credential|Security-Token)|Signature|sig|AWSAccessKeyId|token|key"
    r"|access_token)=)[^&\s\"']+",
    re.IGNORECASE,
)
ASSIGNED = re.compile(rf"({NAME}\\*[\"']?\]?\s*(?:=>|:=|=|:)\s*)(?!{PROSE})({VALUE})", re.IGNORECASE)
FLAG = re.compile(rf"(--?{NAME}[\"']?,?\s+)(?!-)({VALUE})", re.IGNORECASE)
BLOCK = re.compile(rf"({NAME}: *[|>][-+]? *\n)((?:[ \t]+\S.*(?:\n|\Z))+)", re.IGNORECASE)  # of YAML
PGPASS = re.compile(
    r"(\s*(?:\*|[\w.-]*[A-Za-z][\w.-]*|[\d.]{7,}):(?:\*|\d{4,5}):(?:\*|[A-Za-z_][\w-]*):[A-Za-z_][\w.-]*:)([^\s:]+)"
)
ADDRESS = re.compile(  # without a scheme, so with a port or a path: NAME:VALUE@HOST alone may be an e-mail address
    r"((?<![\w/.:-])[A-Za-z_][\w.-]*:)([^\s:/@\"']{6,})(?=@(?:\[[0-9a-f:]+\]|(?!sha\d)[\w.-]+)(?::\d{2,5}\b|/\w))",
    re.IGNORECASE,
)
NETRC = re.compile(r"(\blogin\s+\S+\s+password\s+)(\S+)", re.IGNORECASE)
TYPED = re.compile(  # docker, kubectl, mysql, sshpass, curl, wandb, a person
    r"(\blogin\b.{0,200}?\s-p[ =]?|--from-literal[= ][^=\s]+=|\bsshpass\s+-p\s*|\b(?:mysql|mariadb)\w*\b.{0,200}?\s-p"
    r"|\bcurl\b.{0,300}?\s(?:-u|-U|--user|--proxy-user)[ =]?[\"']?[^\s:]+:|\bwandb login (?:--\S+ )*(?=\w{20})"
    r"|SharedAccessSignature=|\bpass(?:word|phrase) (?:is|was) )(\S+)",
    re.IGNORECASE,
)
FLAG_ALONE = re.compile(rf"--?{NAME}", re.IGNORECASE)
TELLING = re.compile(
    r"token|secret|pass|pwd|_pw|login|literal|key|cred|auth|signature|sas|hook|dsn|cookie|bearer|basic|digest|docker"
    r"|mysql|mariadb|curl",
    re.IGNORECASE,
)
# Settings of the environment that explain failures and hold no secrets; the values of all others are removed.
HARMLESS = re.compile(
    r"NCCL_\w+|FI_\w+|TORCH_\w+|CUDA_\w+|NVIDIA_\w+|MASTER_(?:ADDR|PORT)|(?:LOCAL_|NODE_|GROUP_)?RANK"
    r"|(?:LOCAL_)?WORLD_SIZE"
    r"|PET_\w+|GLOO_\w+|OMP_\w+|MKL_\w+|PYTORCH_\w+|LD_LIBRARY_PATH|PATH|PYTHONPATH|SLURM_(?!JWT)\w+|UCX_\w+"
    r"|RDMAV_\w+|HF_HOME|HF_HUB_OFFLINE"
)
REPEATS = ("kubectl.kubernetes.io/last-applied-configuration", "managedFields")


def without_secrets(bundle: Any) -> Any:
    """The bundle with every secret replaced; values of secret variables are removed wherever else they stand."""
    known: set[str] = set()
    cleaned = _clean(bundle, known)
    values = sorted(
        {part for value in known for part in (value, value.strip()) if len(part) >= SHORTEST}, key=len, reverse=True
    )
    return _without_values(cleaned, values) if values else cleaned


def clean_text(text: str, known: set[str] | None = None) -> str:
    """Text without secrets; what was assigned to a secret's name is noted in `known`."""
    noted = known if known is not None else set()

    def assigned(match: re.Match[str]) -> str:
        value = match[2].strip("\"'")
        if value != REMOVED and not value.startswith(("$", "[removed", "<", "%")):
            noted.add(value)
        return f"{match[1]}{REMOVED}"

    for pattern in PATTERNS:
        text = pattern.sub(REMOVED, text)
    if TELLING.search(text):
        text = BLOCK.sub(lambda match: f"{match[1]}  {REMOVED}\n", text)
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if "://" in line:
            line = SIGNED.sub(
                lambda match: f"{match[1]}{REMOVED}", IN_URL.sub(lambda match: f"{match[1]}{REMOVED}@", line)
            )
        if TELLING.search(line):  # the patterns below are slow on long lines of other things
            line = BEARER.sub(lambda match: f"{match[1]}{REMOVED}", HEADER.sub(assigned, line))
            for pattern in (TYPED, ASSIGNED, FLAG, NETRC):
                line = pattern.sub(assigned, line)
        if "@" in line:
            line = ADDRESS.sub(assigned, line)
        lines[index] = PGPASS.sub(assigned, line) if PGPASS.fullmatch(line) else line
    text = "\n".join(lines)
    for value in noted:
        if len(value) >= SHORTEST:
            text = text.replace(value, REMOVED)
    return text


def _clean(value: Any, known: set[str]) -> Any:
    if isinstance(value, str):
        return clean_text(value, known)
    if isinstance(value, list | tuple):
        return _clean_list(list(value), known)
    if not isinstance(value, Mapping):
        return value
    if value.get("kind") == "Secret":
        _note(value.get("data"), known)
        _note(value.get("stringData"), known)
        value = {key: part for key, part in value.items() if key not in ("data", "stringData")}
    name, literal = value.get("name"), value.get("value")
    if isinstance(name, str) and "value" in value and set(value) <= {"name", "value"}:
        if HARMLESS.fullmatch(name):
            return {"name": name, "value": _clean(literal, known)}
        if SECRET_NAME.search(name):
            _note(literal, known)
        return {"name": name, "value": REMOVED}
    cleaned: dict[str, Any] = {}
    for key, part in value.items():
        key = str(key)
        if key in REPEATS:
            continue
        if SECRET_NAME.search(key) and isinstance(part, str | int | float) and not isinstance(part, bool):
            _note(part, known)
            cleaned[key] = REMOVED
        elif key in ("env", "environment") and isinstance(part, Mapping):
            cleaned[key] = {
                name: _clean(text, known) if HARMLESS.fullmatch(str(name)) else _hide(str(name), text, known)
                for name, text in part.items()
            }
        else:
            cleaned[clean_text(key)] = _clean(part, known)
    return cleaned


def _clean_list(values: list[Any], known: set[str]) -> list[Any]:
    cleaned: list[Any] = []
    for index, value in enumerate(values):
        before = values[index - 1] if index else None
        if (
            isinstance(value, str)
            and isinstance(before, str)
            and FLAG_ALONE.fullmatch(before)
            and not value.startswith("-")
        ):
            _note(value, known)
            cleaned.append(REMOVED)
        else:
            cleaned.append(_clean(value, known))
    return cleaned


def _hide(name: str, value: Any, known: set[str]) -> str:
    if SECRET_NAME.search(name):
        _note(value, known)
    return REMOVED


def _note(value: Any, known: set[str]) -> None:
    if isinstance(value, str) and value != REMOVED:
        known.add(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            _note(part, known)


def _without_values(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REMOVED)
        return value
    if isinstance(value, list):
        return [_without_values(item, secrets) for item in value]
    if isinstance(value, dict):
        return {_without_values(key, secrets): _without_values(part, secrets) for key, part in value.items()}
    return value
