"""Names of images, pins in run files, layers, bills of materials, obstacles: by values."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import UserError
from windlass.image.aws.ecr import EcrHost
from windlass.image.build.logs import obstacle_in
from windlass.image.registry.credentials import Credentials, find_credentials
from windlass.image.registry.reference import ImageReference, is_loopback, pin

DIGEST = "sha256:" + "ab" * 32
NAME = f"r.example:5000/team/train@{DIGEST}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train", (None, "train", None, None)),
        ("team/train:v1", (None, "team/train", "v1", None)),
        ("localhost/train:v1", ("localhost", "train", "v1", None)),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000", "a/b", None, None)),
        (f"r.example/a:v1@{DIGEST}", ("r.example", "a", "v1", DIGEST)),
    ],
)
def test_a_name_is_taken_apart_and_put_together(text, parts):
    found = ImageReference.parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == parts
    assert str(found) == text


@pytest.mark.parametrize("text", ["Upper/case", "a:b:c", "a@sha256:12", "", "a/:x", "-a", "a:" + "x" * 129])
def test_what_is_no_name_is_refused(text):
    with pytest.raises(UserError, match="is no image name"):
        ImageReference.parse(text)


def test_only_registries_of_this_machine_may_speak_plain_http():
    assert all(map(is_loopback, ("localhost", "localhost:5000", "127.0.0.1:1", "[::1]:5000")))
    assert not any(map(is_loopback, ("r.example", "10.0.0.1:5000", "localhost.example")))


def test_registries_of_ecr_are_known_by_their_name():
    assert EcrHost.of("123456789012.dkr.ecr.us-west-2.amazonaws.com") == EcrHost("123456789012", "us-west-2")
    assert EcrHost.of("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn") == EcrHost("123456789012", "cn-north-1")
    assert EcrHost.of("dkr.ecr.us-west-2.amazonaws.com.evil.example") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("image:\n  name: old:1  # why\n  cuda: cpu\n", f"image:\n  name: {NAME}  # why\n  cuda: cpu\n"),
        ("# top\nimage:\n  # inner\n  cuda: cpu\n", f"# top\nimage:\n  # inner\n  name: {NAME}\n  cuda: cpu\n"),
        ("a: 1  # x\n", f"a: 1  # x\nimage:\n  name: {NAME}\n"),
        ("# nothing yet", f"# nothing yet\nimage:\n  name: {NAME}\n"),
        ("image: {cuda: cpu}  # x\n", f"image: {{name: '{NAME}', cuda: cpu}}  # x\n"),
        ("image:\na: 1\n", f"image: {{name: '{NAME}'}}\na: 1\n"),
        ('image: {name: "q"}\n', f"image: {{name: '{NAME}'}}\n"),
    ],
)
def test_a_pin_changes_nothing_else(before, after):
    assert pin(before, NAME) == after
    assert pin(after, NAME) == after


PLAIN = st.one_of(
    st.integers(), st.booleans(), st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=8)
)


@given(
    st.dictionaries(
        st.sampled_from(["model", "data", "image", "train"]), st.dictionaries(st.sampled_from("abc"), PLAIN)
    ),
    st.booleans(),
)
def test_a_pin_reads_back_whatever_the_file_holds(values, flow):
    pinned = yaml.safe_load(pin(yaml.safe_dump(values, default_flow_style=flow), NAME))
    assert pinned == {**values, "image": {**values.get("image", {}), "name": NAME}}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("error committing container: write /x: no space left on device", "the disk is full"),
        ("trying to reuse blob: unauthorized: authentication required", "a registry denies access"),
        ("reading manifest v9 in r.example/x: manifest unknown", "a base image does not exist"),
        (
            "pinging container registry 127.0.0.1:9: dial tcp 127.0.0.1:9: connect: connection refused",
            "a registry does not answer",
        ),
        ("crun: setrlimit `RLIMIT_NPROC`: Operation not permitted", "this user may not run containers here"),
    ],
)
def test_obstacles_are_told_apart(line, what):
    assert obstacle_in(f"STEP 1/2: FROM x\n{line}\n").what == what
    assert obstacle_in("STEP 1/2: FROM x\nSuccessfully installed torch\n") is None


@pytest.mark.parametrize("text", ['{"auths":[1]}', '{"auths":{"r.example":3}}', '{"credHelpers":"a"}', '{"auths":"r"}'])
def test_a_file_of_credentials_that_another_program_broke_holds_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    environment = {"HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_credentials("r.example", environment) is None


def test_credentials_come_from_variables_files_and_helpers(tmp_path, monkeypatch):
    both = {"WINDLASS_REGISTRY_USER": "u", "WINDLASS_REGISTRY_PASSWORD": "p", "HOME": str(tmp_path)}
    assert find_credentials("r.example", both) == Credentials("u", "p")
    with pytest.raises(UserError, match="PASSWORD is not set"):
        find_credentials("r.example", {"WINDLASS_REGISTRY_USER": "u", "HOME": str(tmp_path)})
    file = tmp_path / "auth.json"
    file.write_text(Credentials("keeper", "pass:word").as_auth_file("r.example"))
    known = {"REGISTRY_AUTH_FILE": str(file), "HOME": str(tmp_path)}
    assert find_credentials("r.example", known) == Credentials("keeper", "pass:word")
    assert find_credentials("other.example", known) is None
    helper = tmp_path / "docker-credential-vault"
    helper.write_text('#!/bin/sh\nread host\necho \'{"Username": "\'$host\'", "Secret": "s"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    file.write_text(json.dumps({"credHelpers": {"r.example": "vault"}}))
    assert find_credentials("r.example", known) == Credentials("r.example", "s")
    assert "pass" not in repr(Credentials("u", "pass"))
