"""tools/make_image_table.py reads a package index: a real one over HTTP, with tiny wheels under real names."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest
from packaging.version import Version

from tests.image.wheels import Wheel

TOOL = Path(__file__).parents[2] / "tools" / "make_image_table.py"
LINUX = "; platform_system == 'Linux'"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Parts(Quiet):
    """Gives parts of files, as PyPI's file server does."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        if not wanted:
            return super().do_GET()
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        body = Path(self.translate_path(self.path)).read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_image_table", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tag(python, machine):
    return f"cp3{python}-cp3{python}-manylinux_2_28_{machine}"


@pytest.fixture(scope="module", params=[Quiet, Parts], ids=["whole files", "parts of files"])
def index(request, tmp_path_factory, tool):
    root = tmp_path_factory.mktemp("index")
    needs = [
        f"nvidia-nccl-cu13==2.30.7{LINUX}",
        f"cuda-toolkit[cudart]==13.2.2{LINUX}",
        f"nvidia-cudnn-cu13==9.26.0.51{LINUX}",
        f"triton~=3.9.0{LINUX}",
        "optree>=0.13; extra == 'optree'",
    ]
    wheels = [Wheel("torch", "2.15.0", needs, tag=tag(p, m)) for p in (11, 12) for m in ("x86_64", "aarch64")]
    wheels += [
        Wheel("torch", "2.16.0rc1", needs, tag=tag(12, "x86_64")),
        Wheel("torchvision", "0.29.2", ["torch>=2.14.0"], tag="py3-none-manylinux_2_28_x86_64"),
        Wheel("torchvision", "0.26.0", ["torch==2.11.0"], tag=tag(12, "x86_64")),
        Wheel("torchvision", "0.1.0", ["torch==1.0"], tag=tag(12, "x86_64")),
        Wheel("helper", "1.2", ["torch<2.12,>=2.4", "pip<25.3", "pytest; extra == 'test'"]),
        Wheel("helper", "2.0rc1"),
    ]
    for wheel in wheels:
        folder = root / wheel.name
        folder.mkdir(exist_ok=True)
        wheel.write(folder)
    for folder in root.iterdir():
        links = "".join(f'<a href="{one.name}#sha256=0">{one.name}</a>\n' for one in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(links)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(request.param, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tool.Index(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_a_release_of_torch(tool, index):
    (version, wheels), *others = tool.versions(index.files("torch")).items()
    assert others == [], "no release candidates"
    release = tool.torch_release(version, wheels)
    assert (release["version"], release["triton"]) == ("2.15.0", "~=3.9.0")
    assert release["platforms"]["linux/amd64"] == {
        "python": ["3.11", "3.12"],
        "cuda": "13.2",
        "nccl_package": "nvidia-nccl-cu13",
        "nccl": "2.30.7",
        "cudnn": "9.26.0.51",
        "architectures": [],
        "wheel": "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    }
    assert list(release["platforms"]) == ["linux/amd64", "linux/arm64"]


def test_companions_newest_first(tool, index):
    found = tool.companions(index, "torchvision", Version("0.19"))
    assert list(found.items()) == [("0.29.2", ">=2.14.0"), ("0.26.0", "==2.11.0")]


def test_an_old_table_is_said_and_no_network_is_no_failure(tool, index, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "OUTPUT", tmp_path / "releases.json")
    for newest, code in (("2.14.1", 1), ("2.15.0", 0)):
        tool.OUTPUT.write_text(json.dumps({"made": "2026-09-30", "torch": [{"version": newest}]}))
        assert tool.main(["--check", "--index", index.url]) == code
        assert f"ends with torch {newest}; the index has 2.15.0" in capsys.readouterr().out
    assert tool.main(["--check", "--index", "http://127.0.0.1:9"]) == 0
    assert "is not checked" in capsys.readouterr().out


def test_what_a_package_requires(tool, index):
    assert tool.package(index, "helper") == {
        "1.2": {"only_source": False, "requires": {"torch": "<2.12,>=2.4", "pip": "<25.3"}}
    }
