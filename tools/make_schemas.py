"""Write the schemas in manifests/schemas from the operators' own Go modules: names, types, enums, required fields.

Needs `go`, and its module proxy. What is common to several schemas (the pod spec above all) is written once, under its
digest, in shared.json.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[1] / "windlass" / "targets" / "kubernetes" / "manifests" / "schemas"
KUBERNETES = "k8s.io/kubernetes@v1.36.3"
CRDS = {
    "pytorchjob-1.7": ("github.com/kubeflow/training-operator@v1.7.0", ["kubeflow.org_pytorchjobs.yaml"]),
    "pytorchjob-1.8": ("github.com/kubeflow/training-operator@v1.8.1", ["kubeflow.org_pytorchjobs.yaml"]),
    "pytorchjob-1.9": ("github.com/kubeflow/trainer@v1.9.4", ["kubeflow.org_pytorchjobs.yaml"]),
    **{
        f"trainjob-{version.rpartition('.')[0]}": (
            f"github.com/kubeflow/trainer/v2@v{version}",
            ["trainer.kubeflow.org_trainjobs.yaml", "trainer.kubeflow.org_trainingruntimes.yaml"],
        )
        for version in ("2.0.1", "2.1.0", "2.2.1", "2.3.0")
    },
}
BUILT_IN = {
    "Job": ("apis__batch__v1_openapi.json", "io.k8s.api.batch.v1.Job"),
    "Service": ("api__v1_openapi.json", "io.k8s.api.core.v1.Service"),
    "ConfigMap": ("api__v1_openapi.json", "io.k8s.api.core.v1.ConfigMap"),
    "Secret": ("api__v1_openapi.json", "io.k8s.api.core.v1.Secret"),
    "Pod": ("api__v1_openapi.json", "io.k8s.api.core.v1.Pod"),
}
KEPT = ("type", "enum", "nullable", "x-kubernetes-preserve-unknown-fields")
LEFT_OUT = frozenset(("status", "metadata"))  # of an object; nobody writes the one, every kind has the other
WORTH_SHARING = 120  # letters

TEXT, NUMBER, YES = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def hyperpod(pod_template: Any) -> Any:
    """HyperPodPyTorchJob's CRD is not public; its fields are those of the model in AWS's HyperPod command line."""

    def thing(required: tuple[str, ...] = (), **properties: Any) -> Any:
        return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}

    def many(items: Any) -> Any:
        return {"type": "array", "items": items}

    rule = thing(
        ("name", "logPattern"),
        name=TEXT,
        logPattern=TEXT,
        expectedStartCutOffInSeconds=NUMBER,
        expectedRecurringFrequencyInSeconds=NUMBER,
        metricThreshold=NUMBER,
        operator={"type": "string", "enum": ["gt", "lt", "eq", "gteq", "lteq"]},
        metricEvaluationDataPoints=NUMBER,
        stopPattern=TEXT,
    )
    restart = thing(
        ("evalPeriodSeconds",),
        evalPeriodSeconds=NUMBER,
        numRestartBeforeFullJobRestart=NUMBER,
        maxFullJobRestarts=NUMBER,
        maxNumRepeatOffendersToAvoid=NUMBER,
        scaleUpSnoozeTimeInSeconds=NUMBER,
    )
    policy = thing(
        activeDeadlineSeconds=NUMBER,
        cleanPodPolicy={"type": "string", "enum": ["All", "OnlyComplete", "None"]},
        faultDeadlineSeconds=NUMBER,
        startupDeadlineSeconds=NUMBER,
        jobMaxRetryCount=NUMBER,
        suspend=YES,
        ttlSecondsAfterFinished=NUMBER,
        workloadMode=TEXT,
        restartPolicy=restart,
        logMonitoringConfiguration=many(rule),
    )
    elastic = thing(
        minReplicas=NUMBER,
        maxReplicas=NUMBER,
        replicaIncrementStep=NUMBER,
        replicaDiscreteValues=many(NUMBER),
        scalingTimeoutInSeconds=NUMBER,
        gracefulShutdownTimeoutInSeconds=NUMBER,
        faultyScaleDownTimeoutInSeconds=NUMBER,
    )
    replicas = thing(("name",), name=TEXT, replicas=NUMBER, maxReplicas=NUMBER, spares=NUMBER, template=pod_template)
    spec = thing(nprocPerNode=TEXT, replicaSpecs=many(replicas), runPolicy=policy, elasticPolicy=elastic)
    return thing(("spec",), spec=spec)


def module(version: str) -> Path:
    """The folder of a Go module, downloaded where it is not there."""
    with tempfile.TemporaryDirectory() as empty:  # outside any module, so that no go.mod is asked
        answer = subprocess.run(["go", "mod", "download", "-json", version], cwd=empty, capture_output=True, text=True)
    told = json.loads(answer.stdout or "{}")
    if "Dir" not in told:
        sys.exit(f"{version} could not be downloaded: {told.get('Error') or answer.stderr.strip()}")
    return Path(told["Dir"])


def reduce(schema: Any, definitions: dict[str, Any]) -> Any:
    """Names, types, enums and what is required; no descriptions, defaults, patterns or rules."""
    if "$ref" in schema:
        return reduce(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if len(schema.get("allOf", ())) == 1 and "$ref" in schema["allOf"][0]:
        return reduce(schema["allOf"][0], definitions)
    kinds = {one.get("type") for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))}
    is_mixed = kinds >= {"integer", "string"} or kinds >= {"number", "string"}
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string" or is_mixed:
        return {"x-kubernetes-int-or-string": True}
    kept = {key: schema[key] for key in KEPT if key in schema}
    if "properties" in schema:
        kept["properties"] = {name: reduce(one, definitions) for name, one in sorted(schema["properties"].items())}
    if schema.get("required"):
        kept["required"] = sorted(schema["required"])
    if isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduce(schema["additionalProperties"], definitions)
    if "items" in schema:
        kept["items"] = reduce(schema["items"], definitions)
    return kept


def top_level(schema: Any) -> Any:
    properties = {name: one for name, one in schema["properties"].items() if name not in LEFT_OUT}
    return {**schema, "properties": properties}


def gather() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    specs = module(KUBERNETES) / "api" / "openapi-spec" / "v3"
    version = KUBERNETES.rpartition("@v")[2].rpartition(".")[0]
    built_in = {}
    for kind, (file, name) in BUILT_IN.items():
        definitions = json.loads((specs / file).read_text())["components"]["schemas"]
        built_in[kind] = top_level(reduce(definitions[name], definitions))
    found[f"kubernetes-{version}"] = built_in
    for name, (where, files) in CRDS.items():
        for file in files:
            crd = yaml.load((module(where) / "manifests/base/crds" / file).read_text(), Loader=yaml.CSafeLoader)
            newest = crd["spec"]["versions"][-1]
            schema = top_level(reduce(newest["schema"]["openAPIV3Schema"], {}))
            found.setdefault(name, {})[crd["spec"]["names"]["kind"]] = schema
    template = built_in["Job"]["properties"]["spec"]["properties"]["template"]
    found["hyperpod-1"] = {"HyperPodPyTorchJob": hyperpod(template)}
    return found


def share(schemas: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Schemas with their repeated parts taken out, and those parts by their digest."""
    seen: Counter[str] = Counter()

    def count(part: Any) -> None:
        text = json.dumps(part, sort_keys=True, separators=(",", ":"))
        seen[text] += 1
        if seen[text] == 1:  # what is inside a repeated part is repeated with it
            for below in _below(part):
                count(below)

    for kinds in schemas.values():
        for schema in kinds.values():
            count(schema)
    shared: dict[str, Any] = {}

    def replace(part: Any) -> Any:
        text = json.dumps(part, sort_keys=True, separators=(",", ":"))
        if seen[text] > 1 and len(text) > WORTH_SHARING:
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            if digest not in shared:
                shared[digest] = {}
                shared[digest] = inside(part)
            return {"$ref": digest}
        return inside(part)

    def inside(part: Any) -> Any:
        made = dict(part)
        if "properties" in made:
            made["properties"] = {name: replace(one) for name, one in made["properties"].items()}
        for key in ("items", "additionalProperties"):
            if key in made:
                made[key] = replace(made[key])
        return made

    small = {name: {kind: inside(schema) for kind, schema in kinds.items()} for name, kinds in schemas.items()}
    return dict(sorted(shared.items())), small


def _below(part: Any) -> list[Any]:
    found = list(part.get("properties", {}).values())
    return found + [part[key] for key in ("items", "additionalProperties") if isinstance(part.get(key), dict)]


def main() -> int:
    shared, small = share(gather())
    SCHEMAS.mkdir(exist_ok=True)
    for old in SCHEMAS.glob("*.json"):
        old.unlink()
    for name, content in {"shared": shared, **small}.items():
        lines = [f"{json.dumps(key)}: {json.dumps(one, separators=(',', ':'))}" for key, one in content.items()]
        (SCHEMAS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    size = sum(path.stat().st_size for path in SCHEMAS.glob("*.json"))
    print(f"{len(small)} files and {len(shared)} shared parts, {size / 1024:.0f} KiB, in {SCHEMAS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
