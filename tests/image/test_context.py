"""Which files go into a build, their hash, and the staged copy that fixes may change."""

from __future__ import annotations

import os
import subprocess
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.image.build.context import Context, Ignore, write_zip
from windlass.image.build.records import ImageRecord, Records, commit_of, content_digest, tag_for


@pytest.mark.parametrize(
    ("patterns", "path", "ignored"),
    [
        ("*.log", "a.log", True),
        ("*.log", "sub/a.log", False),
        ("**/*.log", "sub/deep/a.log", True),
        ("data", "data/x/y.bin", True),
        ("/data/", "data/x", True),
        ("data", "database", False),
        ("*\n!train.py", "train.py", False),
        ("*\n!train.py", "other.py", True),
        ("docs/**", "docs/a/b", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[ab].txt", "b.txt", True),
        ("[^ab].txt", "b.txt", False),
        ("a[^b]c", "a/c", False),
        ("\\*.txt", "b.txt", False),
        ("\\*.txt", "*.txt", True),
        ("/\n.", "x", False),
        ("# comment\n\n", "x", False),
        ("**/secret", "secret", True),
        ("a/**/z", "a/b/c/z", True),
        ("a/**/z", "a/z", True),
    ],
)
def test_dockerignore(patterns, path, ignored):
    assert Ignore.of(patterns).ignores(path) is ignored


def test_without_a_dockerignore_secrets_and_clutter_stay_home(tmp_path):
    for name in ("train.py", ".env", "sub/.env.local", ".git/config", "runs/r/x", "key.pem", "a/__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert Context.open(tmp_path).files == ("train.py",)


def project(folder, **texts):
    for name, text in texts.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Context.open(folder)


def test_the_digest_is_of_names_and_content_not_of_time_and_place(tmp_path):
    one = project(tmp_path / "one", a="1", b="2")
    other = project(tmp_path / "other", b="2", a="1")
    os.utime(tmp_path / "other" / "a", (1, 1))
    assert one.digest() == other.digest()
    (tmp_path / "other" / "a").chmod(0o755)
    assert Context.open(tmp_path / "other").digest() != one.digest()


@given(
    st.dictionaries(st.sampled_from("abc"), st.text(max_size=3), min_size=1),
    st.sampled_from("abc"),
    st.text(max_size=3),
)
def test_a_changed_text_gives_the_digest_that_the_changed_file_has(tmp_path_factory, files, name, text):
    before = project(tmp_path_factory.mktemp("x") / "p", **files)
    after = project(tmp_path_factory.mktemp("x") / "p", **{**files, name: text})
    assert before.digest({name: text}) == after.digest()


def test_staging_never_writes_into_the_users_files(tmp_path):
    context = project(tmp_path / "p", **{"requirements.txt": "torch\n", ".dockerignore": "x\n"})
    (tmp_path / "p" / "link").symlink_to("requirements.txt")
    context = Context.open(tmp_path / "p")
    staged = tmp_path / "staged"
    staged.mkdir()
    context.stage(staged, {"requirements.txt": "torch==2.14.1\n", "new/file.txt": "n"})
    assert (staged / "requirements.txt").read_text() == "torch==2.14.1\n"
    assert (tmp_path / "p" / "requirements.txt").read_text() == "torch\n"
    assert os.readlink(staged / "link") == "requirements.txt"
    assert (staged / "new" / "file.txt").read_text() == "n"
    assert not (staged / ".dockerignore").exists()  # applied already


def test_texts_are_the_small_ones_that_say_what_is_installed(tmp_path):
    context = project(tmp_path / "p", **{"requirements.txt": "torch", "train.py": "x", "large.txt": "x" * 300_000})
    assert set(context.texts()) == {"requirements.txt"}


def test_a_folder_that_may_be_listed_but_not_entered_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    for name in ("open.txt", "closed/secret.txt"):
        (tmp_path / name).touch()

    def refusing(look):
        def look_or_refuse(path, *arguments, **options):
            if str(path).endswith("secret.txt"):
                raise PermissionError(13, "Permission denied")  # which root, who runs tests too, never gets
            return look(path, *arguments, **options)

        return look_or_refuse

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    assert Context(tmp_path, Ignore(())).files == ("open.txt",)


def test_an_archive_of_the_same_files_is_the_same(tmp_path):
    context = project(tmp_path / "p", a="1", b="2")
    (tmp_path / "p" / "b").chmod(0o755)
    for number in (1, 2):
        os.utime(tmp_path / "p" / "a", (number, number))
        write_zip(context.folder, context.files, tmp_path / f"{number}.zip", {"extra": "text"})
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        assert archive.namelist() == ["a", "b", "extra"]
        assert archive.getinfo("b").external_attr >> 16 == 0o755


def test_a_tag_says_commit_and_content(tmp_path):
    assert commit_of(tmp_path) is None
    assert tag_for(None, "0123456789abcdef") == "files-0123456789ab"

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "a").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("remote", "add", "origin", "https://user:secret@example.com/team/code.git")
    commit = commit_of(tmp_path)
    assert not commit.changed
    assert commit.source == "https://example.com/team/code.git"
    assert tag_for(commit, "0123456789abcdef") == f"git-{commit.revision[:12]}-0123456789ab"
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path).changed


def test_everything_that_decides_the_build_is_in_its_content():
    told = {"dockerfile": "FROM x", "files": "f", "platform": "linux/amd64", "arguments": {"A": "1"}, "target": None}
    changes = {"dockerfile": "FROM y", "files": "g", "platform": "linux/arm64", "arguments": {"A": "2"}, "target": "t"}
    digests = {content_digest(**told), *(content_digest(**{**told, key: value}) for key, value in changes.items())}
    assert len(digests) == 1 + len(changes)


def test_the_newest_image_of_a_run_is_not_one_of_another_run(tmp_path):
    records = Records(tmp_path)
    parts = {"id": "0", "platform": "linux/amd64", "content": "c", "builder": "buildah"}
    mine = ImageRecord("localhost/mine", "files-1", "localhost/mine:files-1", pushed="r.example/mine@sha256:1", **parts)
    other = ImageRecord("localhost/other", "files-2", "localhost/other:files-2", **parts)  # newer, and not pushed
    records.save(mine)
    records.save(other)
    os.utime(tmp_path / "files-1" / "image.json", (1, 1))
    assert records.find(None, "localhost/mine") == mine
    assert records.find("localhost/other:files-2") == other
    assert records.find("r.example/mine@sha256:1") == mine
    assert records.find("files-3") is None
