"""ECR, CodeBuild and their infrastructure against moto's server: boto3's own requests over real HTTP."""

from __future__ import annotations

import json
import zipfile

import pytest
import yaml

from windlass.cli.main import run_command
from windlass.errors import UserError
from windlass.image.aws.codebuild import CloudWorkshop, buildspec
from windlass.image.aws.ecr import EcrHost, ensure_repository, push_token, template
from windlass.image.build.building import Failed, Made, Watcher
from windlass.image.build.context import Context
from windlass.image.build.job import Job, Proof, Settings, Source
from windlass.image.build.testing import script
from windlass.image.read.texts import Texts

pytestmark = pytest.mark.slow

ACCOUNT, REGION = "123456789012", "us-west-2"
HOST = EcrHost(ACCOUNT, REGION)
TEMPLATE = template()
PROJECT, REPOSITORY, BUCKET = "windlass-image", "team/train", "contexts"


@pytest.fixture(scope="module")
def server():
    from moto.server import ThreadedMotoServer

    one = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    one.start()
    host, port = one.get_host_and_port()
    yield f"http://{host}:{port}"
    one.stop()


@pytest.fixture
def aws(server, monkeypatch):
    import boto3

    for name, value in (
        ("AWS_ENDPOINT_URL", server),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", REGION),
        ("AWS_DEFAULT_REGION", REGION),
    ):
        monkeypatch.setenv(name, value)
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST")).close()
    return lambda service: boto3.client(service, region_name=REGION)


def test_a_repository_is_made_as_it_should_be_and_then_left_alone(aws):
    made = ensure_repository(HOST, "team/train")
    assert made.created
    found = aws("ecr").describe_repositories(repositoryNames=["team/train"])["repositories"][0]
    assert found["imageTagMutability"] == "IMMUTABLE"
    assert found["imageScanningConfiguration"]["scanOnPush"]
    policy = json.loads(aws("ecr").get_lifecycle_policy(repositoryName="team/train")["lifecyclePolicyText"])
    assert policy["rules"][0]["selection"]["tagStatus"] == "untagged"
    again = ensure_repository(HOST, "team/train")
    assert (again.created, again.warnings) == (False, ())


def test_the_gaps_of_a_repository_that_is_there_are_named(aws):
    aws("ecr").create_repository(repositoryName="old")
    found = ensure_repository(HOST, "old")
    assert [warning.split(":")[0] for warning in found.warnings] == [
        *("tags of old can move", "old scans nothing", "old has no lifecycle policy")
    ]


def test_a_token_for_ecr_is_a_user_and_a_password(aws):
    assert push_token(HOST).user == "AWS"


def test_what_aws_refuses_is_an_error_that_says_what_to_do(aws, monkeypatch, tmp_path):
    aws("s3").create_bucket(Bucket="contexts", CreateBucketConfiguration={"LocationConstraint": REGION})
    nowhere = CloudWorkshop("nothing", "contexts", REGION)
    with pytest.raises(UserError, match="there is no CodeBuild project nothing"):
        nowhere.make(job(tmp_path), Watcher())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)  # it remembers the credentials that were there
    with pytest.raises(UserError, match="AWS does not know who you are"):
        push_token(HOST)


def job(folder, recipe="FROM python:3.12-slim\nCOPY . /workspace\n"):
    (folder / "context").mkdir(exist_ok=True)
    context = Context.open(folder / "context")
    title = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/train"
    source = Source(title, Texts(recipe), context, "linux/amd64")
    return Job(source, f"{title}:files-1", "files-1", {"a": "b c"}, Settings(proof=Proof("quick")), folder, 1)


@pytest.fixture
def project(aws):
    """What the CloudFormation template makes, as far as a build asks for it."""
    aws("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    template = TEMPLATE["Resources"]["Project"]["Properties"]
    lower = {
        name[0].lower() + name[1:]: {k[0].lower() + k[1:]: v for k, v in value.items()}
        for name, value in template.items()
        if name in ("Source", "Artifacts", "Environment")
    }
    role = f"arn:aws:iam::{ACCOUNT}:role/{PROJECT}"
    lower["source"] |= {"buildspec": lower["source"].pop("buildSpec"), "location": f"{BUCKET}/windlass/context.zip"}
    lower["environment"]["computeType"] = "BUILD_GENERAL1_LARGE"
    aws("ecr").create_repository(repositoryName=REPOSITORY)
    aws("codebuild").create_project(name=PROJECT, serviceRole=role, **lower)
    return CloudWorkshop(PROJECT, BUCKET, REGION, wait=lambda seconds: None)


def test_codebuild_gets_the_context_the_proof_and_a_buildspec(aws, project, tmp_path):
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "train.py").write_text("print(1)\n")
    one = job(tmp_path)
    manifest = (
        '{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": {}, "layers": []}'
    )
    aws("ecr").put_image(repositoryName="team/train", imageTag="files-1", imageManifest=manifest)
    made = project.make(one, Watcher())
    assert isinstance(made, Made)
    digest = aws("ecr").describe_images(repositoryName="team/train")["imageDetails"][0]["imageDigest"]
    assert made.pushed == f"{one.source.title}@{digest}"

    aws("s3").download_file(BUCKET, "windlass/files-1/context.zip", str(tmp_path / "sent.zip"))
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        assert sent.read("context/train.py") == b"print(1)\n"
        assert sent.read(".windlass-build/Dockerfile").decode() == one.source.recipe
        assert sent.read(".windlass-build/proof.py").decode() == script()
    ids = aws("codebuild").list_builds_for_project(projectName=PROJECT)["ids"]
    assert len(ids) == 1


def test_a_failed_proof_in_codebuild_is_a_failed_attempt_with_its_log(aws, project, tmp_path, monkeypatch):
    """moto's builds always succeed, so the end of this one is changed on its way back."""
    one = job(tmp_path)
    report = {
        "passed": False,
        "level": "quick",
        "loaded": {},
        "checks": [{"name": "import torch", "status": "failed", "detail": "no"}],
    }
    ended = ({"buildStatus": "FAILED", "phases": []}, ["STEP 1/2: FROM x", "ERROR: nothing"])
    monkeypatch.setattr(project, "_follow", lambda build, watcher: ended)
    monkeypatch.setattr(project, "_report", lambda job: report)
    failed = project.make(one, Watcher())
    assert isinstance(failed, Failed)
    assert "import torch: no" in failed.log
    assert "ERROR: nothing" in failed.kept.read_text()
    monkeypatch.setattr(project, "_report", lambda job: None)
    assert "ERROR: nothing" in project.make(one, Watcher()).log


def test_the_log_of_a_build_is_followed_line_by_line(aws, project):
    from windlass.image.aws.codebuild import _new_lines

    logs = aws("logs")
    logs.create_log_group(logGroupName="/aws/codebuild/x")
    place = {"groupName": "/aws/codebuild/x", "streamName": "s"}
    assert _new_lines(logs, place, None) == ([], None)  # the stream is not there yet
    logs.create_log_stream(logGroupName="/aws/codebuild/x", logStreamName="s")

    def write(*texts):
        import time

        events = [{"timestamp": int(time.time() * 1000), "message": f"{text}\n"} for text in texts]
        logs.put_log_events(logGroupName="/aws/codebuild/x", logStreamName="s", logEvents=events)

    write("one", "two")
    lines, token = _new_lines(logs, place, None)
    assert lines == ["one", "two"]
    write("three")
    assert _new_lines(logs, place, token)[0] == ["three"]


def test_the_buildspec_pushes_only_after_the_proof(tmp_path):
    spec = yaml.safe_load(yaml.safe_dump(buildspec(job(tmp_path), "s3://bucket/windlass/files-1")))
    build = spec["phases"]["build"]["commands"]
    assert build[0].startswith("docker buildx build")
    assert "'a=b c'" in build[0]
    assert "proof.py > report.json" in build[1]
    assert not any("docker push" in command for command in build)
    assert all(phase["on-failure"] == "ABORT" for phase in spec["phases"].values())
    assert any("docker push" in command for command in spec["phases"]["post_build"]["commands"])
    assert "password-stdin" in spec["phases"]["pre_build"]["commands"][0]


def test_the_role_may_do_no_more_than_a_build_needs():
    policy = TEMPLATE["Resources"]["Role"]["Properties"]["Policies"][0]["PolicyDocument"]
    wide = [one for one in policy["Statement"] if one["Resource"] == ["*"]]
    assert [one["Action"] for one in wide] == [["ecr:GetAuthorizationToken"]]


def test_the_command_prints_the_template_and_makes_nothing(aws, capsys):
    assert run_command(["image", "infrastructure"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["Resources"]["Images"]["Properties"]["ImageTagMutability"] == "IMMUTABLE"
    assert aws("codebuild").list_projects()["projects"] == []


def test_the_cloudformation_template_is_valid():
    """By cfn-lint, which knows AWS's published schema of every resource; and it keeps what `push` keeps."""
    from cfnlint.api import ManualArgs, lint

    assert [str(one) for one in lint(json.dumps(TEMPLATE), config=ManualArgs(regions=[REGION]))] == []
    kept = TEMPLATE["Resources"]["Images"]["Properties"]["LifecyclePolicy"]["LifecyclePolicyText"]
    (rule,) = json.loads(kept)["rules"]
    assert rule["action"] == {"type": "expire"}
    assert (rule["selection"]["tagStatus"], rule["selection"]["countNumber"]) == ("untagged", 14)


def test_where_no_builder_is_codebuild_builds_what_belongs_to_ecr(aws, tmp_path, monkeypatch, capsys):
    (tmp_path / "Dockerfile").write_text("FROM python:3.12-slim\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    name = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/train"
    assert run_command(["image", "build", "--name", name, "--platform", "linux/arm64", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["builder"] == "codebuild"
    assert shown["request"]["environmentTypeOverride"] == "ARM_CONTAINER"
    assert yaml.safe_load(shown["request"]["buildspecOverride"])["version"] == 0.2
    assert run_command(["image", "build", "--name", "r.example/train", "--dry-run", "--json"]) == 2
    assert "no builder on this machine" in json.loads(capsys.readouterr().out)["error"]
