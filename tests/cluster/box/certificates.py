"""The box's certificate authority, what it signs, and kubeconfig files made of it."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

from tests.cluster.box.host import run
from tests.cluster.box.layout import API, API_SERVICE, DOMAIN, HOST, NODES, ROOT

FOLDER = ROOT / "pki"
YEARS = 3650  # days


def authority(name: str = "ca", subject: str = "/CN=windlass-box") -> None:
    """A self-signed authority: name.crt and name.key."""
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    files = ["-keyout", str(FOLDER / f"{name}.key"), "-out", str(FOLDER / f"{name}.crt")]
    run("openssl", "req", "-x509", *_KEY, "-days", "30", "-subj", subject, *usage, *files)


def operator_authority(name: str, expected: str) -> None:
    """One that the operators' certificate library takes over: an RSA key in the old format, good for years."""
    run("openssl", "genrsa", "-traditional", "-out", FOLDER / f"{name}.key", "2048")
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature,keyEncipherment"]
    named = ["-subj", f"/CN={expected}", "-addext", f"subjectAltName=DNS:{expected}"]
    made = ["-key", str(FOLDER / f"{name}.key"), "-out", str(FOLDER / f"{name}.crt")]
    run("openssl", "req", "-x509", "-new", "-days", str(YEARS), *named, *usage, *made)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def sign(name: str, subject: str, extension: str, by: str = "ca", days: int = 30) -> None:
    """A key and a certificate: name.crt and name.key."""
    request = subprocess.run(
        ["openssl", "req", *_KEY, "-subj", subject, "-keyout", FOLDER / f"{name}.key"],
        check=True,
        capture_output=True,
    ).stdout
    extensions = FOLDER / f"{name}.ext"
    extensions.write_text(extension)
    by_authority = ["-CA", str(FOLDER / f"{by}.crt"), "-CAkey", str(FOLDER / f"{by}.key")]
    serial = ["-set_serial", f"0x{name.encode().hex()[-36:]}"]
    made = ["-extfile", str(extensions), "-out", str(FOLDER / f"{name}.crt")]
    subprocess.run(
        ["openssl", "x509", "-req", "-days", str(days), *by_authority, *serial, *made],
        input=request,
        check=True,
        capture_output=True,
    )
    extensions.unlink()


def make() -> None:
    """Everything the control plane and the nodes need."""
    FOLDER.mkdir(mode=0o700, parents=True)
    authority()
    names = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        f"kubernetes.default.svc.{DOMAIN}",
    ]
    alternatives = ",".join([f"DNS:{name}" for name in names] + [f"IP:{a}" for a in ("127.0.0.1", HOST, API_SERVICE)])
    both = "extendedKeyUsage=serverAuth,clientAuth"
    sign("apiserver", "/CN=kube-apiserver", f"subjectAltName={alternatives}")
    sign("etcd", "/CN=etcd", f"subjectAltName=IP:{HOST}\n{both}")
    client = "extendedKeyUsage=clientAuth"
    sign("etcd-client", "/CN=kube-apiserver", client)
    sign("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", client)
    sign("front-proxy-client", "/CN=front-proxy", client)
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", FOLDER / "sa.key")
    run("openssl", "ec", "-in", FOLDER / "sa.key", "-pubout", "-out", FOLDER / "sa.pub")
    for name, subject in (
        ("admin", "/O=system:masters/CN=admin"),
        ("developer", "/O=developers/CN=developer"),
        ("controllers", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
        ("proxy", "/CN=system:kube-proxy"),
    ):
        sign(name, subject, client)
    for node in NODES:
        alternative = f"subjectAltName=DNS:{node.name},IP:{node.address}"
        sign(node.name, f"/O=system:nodes/CN=system:node:{node.name}", f"{alternative}\n{both}")


def kubeconfig(path: Path, identity: str, namespace: str = "default") -> Path:
    """A file that needs no other file."""
    encoded = {
        part: base64.b64encode((FOLDER / part).read_bytes()).decode()
        for part in ("ca.crt", f"{identity}.crt", f"{identity}.key")
    }
    user = {"client-certificate-data": encoded[f"{identity}.crt"], "client-key-data": encoded[f"{identity}.key"]}
    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "box", "cluster": {"server": API, "certificate-authority-data": encoded["ca.crt"]}}],
        "users": [{"name": identity, "user": user}],
        "contexts": [{"name": "box", "context": {"cluster": "box", "user": identity, "namespace": namespace}}],
        "current-context": "box",
    }
    path.write_text(json.dumps(configuration, indent=1))
    path.chmod(0o600)
    return path
