"""A server that speaks the Kubernetes API, clients that talk to it, and a namespace that keeps what is created."""

import json
import ssl
import subprocess

import pytest

from tests.kubernetes.api_server import Server, write_kubeconfig
from windlass.targets.kubernetes.api import http as api_module
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def connect(server, tmp_path, monkeypatch):
    """Makes clients; the kubeconfig of the newest one is that of this process, too."""
    monkeypatch.setattr(api_module, "FIRST_WAIT", 0.01)
    clients = []

    def make(user=None, url=None, **cluster):
        path = write_kubeconfig(tmp_path / "kubeconfig", url or server.url, user, **cluster)
        monkeypatch.setenv("KUBECONFIG", str(path))
        clients.append(Api(access()))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def api(connect):
    return connect({"token": "t"})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server's certificate for 127.0.0.1, and two of users."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "first", "second"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)
    return folder


@pytest.fixture
def tls_server(server, certificates):
    """A server that asks for certificates and says whose it got."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    context.load_verify_locations(certificates / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    server.socket = context.wrap_socket(server.socket, server_side=True)

    def whoami(handler):
        subject = (handler.connection.getpeercert() or {}).get("subject") or ()
        handler.json({"user": next((value for part in subject for key, value in part if key == "commonName"), None)})

    server.on("/whoami", whoami)
    return server


@pytest.fixture
def cluster_of_objects(server):
    """A namespace that keeps what is created; `refuse` names what it does not do, by verb and plural."""
    there, refuse = {}, {}

    def collection(plural, version, within="namespaces/team/"):
        base = f"/api{'s' if '/' in version else ''}/{version}/{within}{plural}"

        def object_at(handler):
            name = handler.path.split("?")[0].rpartition("/")[2]
            why = refuse.get((handler.command, plural))
            if why:
                handler.status(403, "Forbidden", why)
            elif (plural, name) not in there:
                handler.status(404, "NotFound", f"{plural} {name} not found")
            elif handler.command == "DELETE":
                handler.json(there.pop((plural, name)))
            else:
                if handler.command == "PATCH":
                    there[plural, name]["metadata"] |= json.loads(handler.body)["metadata"]
                handler.json(there[plural, name])

        def create(handler):
            if handler.command == "GET":
                handler.json({"metadata": {}, "items": [value for (kind, _), value in there.items() if kind == plural]})
                return
            value = json.loads(handler.body)
            name = value["metadata"]["name"]
            if (plural, name) in there:
                handler.status(409, "AlreadyExists", f"{plural} {name} already exists")
                return
            if refuse.get(("POST", plural)):
                handler.status(403, "Forbidden", refuse["POST", plural])
                return
            value["metadata"]["uid"] = f"uid-{name}"
            if "dryRun" not in handler.params:
                there[plural, name] = value
                server.on(f"{base}/{name}", object_at)
            handler.json(value, 201)

        server.on(base, create)

    collection("configmaps", "v1")
    collection("secrets", "v1")
    collection("services", "v1")
    collection("jobs", "batch/v1")
    collection("serviceaccounts", "v1")  # of the retry loop of detached runs, with its roles
    for plural, within in (("roles", "namespaces/team/"), ("clusterroles", "")):
        collection(plural, "rbac.authorization.k8s.io/v1", within)
        collection(plural.replace("roles", "rolebindings"), "rbac.authorization.k8s.io/v1", within)
    return there, refuse
