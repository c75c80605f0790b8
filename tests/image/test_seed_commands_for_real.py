"""The seeds' `build_image.py --auto_fix` with a real builder: built, proven, tagged, pushed to $ECR_REPOSITORY."""

import json
import subprocess
import sys

import pytest

from tests.image.conftest import REPOSITORY
from tests.image.test_build_for_real import DOCKERFILE

pytestmark = pytest.mark.image


def test_the_quick_start_builds_tags_and_pushes(bench, registry):
    bench.write(
        Dockerfile=DOCKERFILE,
        **{"requirements.txt": "torch==2.14.1\ntransformers==5.22.2\n", "train.py": "print('first')\n"},
    )
    script = REPOSITORY / "claude-commands" / "build_image.py"
    done = subprocess.run(
        [sys.executable, str(script), "--auto_fix", "--tag", "llama32-1b-v1"],
        capture_output=True, text=True, check=False, cwd=bench.folder,
        env={**bench.environment, "ECR_REPOSITORY": f"{registry.host}/team/fsdp"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = json.loads(done.stdout)
    assert built["image"].endswith(":llama32-1b-v1")
    assert built["proof"]["passed"]
    assert built["pushed"].startswith(f"{registry.host}/team/fsdp@sha256:")
