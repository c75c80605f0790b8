"""Unpack the windlass that a job carries and run its entry or the module named; one file, needs Python alone."""

import glob
import hashlib
import io
import os
import sys
import tarfile

CARRIED, SCRATCH = "/windlass/carried", "/windlass/scratch"


def main() -> None:
    archive = b""
    for path in sorted(glob.glob(f"{CARRIED}/windlass.[0-9][0-9]")):
        with open(path, "rb") as part:
            archive += part.read()
    with open(f"{CARRIED}/windlass.digest") as file:
        digest = file.read().strip()
    if hashlib.sha256(archive).hexdigest() != digest:
        sys.exit("windlass: the carried archive is not whole")
    folder = f"{SCRATCH}/windlass-{digest[:12]}"
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = folder + (os.pathsep + earlier if earlier else "")
    os.execv(sys.executable, [sys.executable, "-m", *(sys.argv[1:] or ["windlass.targets.kubernetes.entry"])])


if __name__ == "__main__":
    main()
