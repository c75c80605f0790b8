"""Kubeconfig files, as kubectl reads them."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.kubernetes.api_server import write_kubeconfig
from windlass.errors import UserError
from windlass.targets.kubernetes.api import kubeconfig
from windlass.targets.kubernetes.api.credentials import parse_answer, run_plugin, tls
from windlass.targets.kubernetes.api.errors import UnreachableError
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.api.kubeconfig import access


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = write_kubeconfig(tmp_path / "config", "https://one:6443", {"token": "t"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def test_the_current_context(file):
    found = access()
    assert (found.context, found.namespace, found.server) == ("here", "team", "https://one:6443")
    assert access(namespace="other").namespace == "other"
    assert "token" not in repr(found).replace("token=", "")


def test_several_files_are_merged_and_the_first_wins(file, tmp_path, monkeypatch):
    second = tmp_path / "second"
    second.write_text(
        json.dumps(
            {
                "current-context": "there",
                "contexts": [
                    {"name": "there", "context": {"cluster": "d"}},
                    {"name": "here", "context": {"cluster": "d", "namespace": "hidden"}},
                ],
                "clusters": [{"name": "d", "cluster": {"server": "https://two:6443"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'missing'}:{file}:{second}")
    assert (access().context, access().namespace) == ("here", "team")
    assert (access("there").server, access("there").namespace) == ("https://two:6443", "default")


def test_a_wrong_context_gets_the_nearest(file):
    with pytest.raises(UserError) as error:
        access("hree")
    assert "there is no context 'hree'" in error.value.what
    assert error.value.evidence == "contexts there: here"
    assert error.value.fix.startswith("--on kubernetes:here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is no kubeconfig"),
        ("contexts: [{name: a, context: {cluster: b}}]\ncurrent-context: a", "names the cluster 'b'"),
        ("contexts: []", "no context is chosen"),
    ],
)
def test_broken_files(file, text, words):
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        access()


def test_no_file_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    with pytest.raises(UserError, match="no Kubernetes cluster is configured") as error:
        access()
    assert "windlass cluster use NAME" in error.value.fix  # needs no other tool


def test_in_a_pod_its_service_account_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("mine")
    found = access()
    assert (found.server, found.namespace, found.context) == ("https://[fd00::1]:443", "mine", "in-cluster")


def test_a_plugin_that_is_missing_or_fails(tmp_path, monkeypatch):
    entry = {"command": "no-such-plugin", "installHint": "brew install it"}
    path = write_kubeconfig(tmp_path / "config", "https://one", {"exec": entry})
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(UserError, match=r"no-such-plugin .* is not installed") as error:
        run_plugin(access())
    assert error.value.fix == "brew install it"
    plugin = tmp_path / "aws"
    plugin.write_text("#!/bin/sh\necho 'The SSO session has expired' >&2\nexit 1\n")
    plugin.chmod(0o755)
    write_kubeconfig(path, "https://one", {"exec": {"command": str(plugin)}})
    with pytest.raises(UserError, match="gave no credentials") as error:
        run_plugin(access())
    assert "SSO session" in error.value.evidence
    assert "aws sso login" in error.value.fix
    plugin.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(UserError, match="ExecCredential"):
        run_plugin(access())


def test_certificates_that_are_none(tmp_path, monkeypatch):
    path = write_kubeconfig(tmp_path / "config", "https://one", **{"certificate-authority-data": "bm9uZQ=="})
    monkeypatch.setenv("KUBECONFIG", str(path))
    found = access()
    with pytest.raises(UserError, match="certificates of the context here"):
        tls(found)


def script(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


def printing(**status):
    return f"printf %s '{json.dumps({'kind': 'ExecCredential', 'status': status})}'"


# -- as another user


def headers_of(server, api):
    seen = []
    server.on("/h", lambda handler: (seen.extend(handler.headers.items()), handler.json({}))[1])
    api.get("/h")
    return [(name, value) for name, value in seen if name.startswith("Impersonate")]


def test_a_user_acts_as_the_one_it_impersonates(server, connect):
    user = {
        "token": "admin",
        "as": "readonly",
        "as-uid": "7",
        "as-groups": ["viewers", "staff"],
        "as-user-extra": {"acme.com/reason": ["test", "é"]},
    }
    assert headers_of(server, connect(user)) == [
        ("Impersonate-User", "readonly"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "viewers"),
        ("Impersonate-Group", "staff"),
        ("Impersonate-Extra-acme.com%2Freason", "test"),
        ("Impersonate-Extra-acme.com%2Freason", "é".encode().decode("latin1")),
    ]


def test_commands_in_pods_run_as_the_one_it_impersonates(server, connect):
    seen = []
    server.on(
        "/exec", lambda handler: (seen.append(dict(handler.headers.items())), handler.status(403, "Forbidden", "no"))[1]
    )
    api = connect({"token": "admin", "as": "readonly", "as-groups": ["viewers"]})
    with pytest.raises(UserError), api.websocket("/exec", [], ["v4.channel.k8s.io"]):
        pass
    assert {(item.get("Impersonate-User"), item.get("Impersonate-Group")) for item in seen} == {("readonly", "viewers")}


@pytest.mark.parametrize(
    "user",
    [
        {"as-groups": ["viewers"]},
        {"as-uid": "7"},
        {"as": "a", "as-groups": "viewers"},
        {"as": "a", "as-user-extra": {"k": "v"}},
        {"as": "a\r\nX: y"},
    ],
)
def test_an_impersonation_of_nobody_is_refused(connect, user):
    with pytest.raises(UserError, match="impersonates"):
        connect({"token": "t", **user})


# -- plugins as client-go calls them


def test_a_plugin_is_told_the_cluster_and_found_beside_the_kubeconfig(tmp_path, monkeypatch):
    info = tmp_path / "info"
    script(tmp_path / "bin" / "plugin", f'printf %s "$KUBERNETES_EXEC_INFO" > {info}', printing(token="t"))
    (tmp_path / "ca.crt").write_text("authority")
    entry = {"command": "./bin/plugin", "apiVersion": "client.authentication.k8s.io/v1", "provideClusterInfo": True}
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}
    path = write_kubeconfig(
        tmp_path / "config",
        "https://one:6443",
        {"exec": {**entry, "interactiveMode": "IfAvailable"}},
        **{"certificate-authority": "ca.crt", "tls-server-name": "api", "extensions": [extension]},
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.chdir("/")
    assert run_plugin(access()).token == "t"
    spec = json.loads(info.read_text())["spec"]
    assert spec == {
        "interactive": False,
        "cluster": {
            "server": "https://one:6443",
            "certificate-authority-data": base64.b64encode(b"authority").decode(),
            "tls-server-name": "api",
            "config": {"audience": "x"},
        },
    }


def test_a_plugin_that_needs_a_terminal_says_so_where_there_is_none(tmp_path, monkeypatch):
    script(tmp_path / "plugin", printing(token="t"))
    entry = {"command": str(tmp_path / "plugin"), "interactiveMode": "Always"}
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", "https://one", {"exec": entry})))
    with pytest.raises(UserError, match="wants to ask somebody at a terminal"):
        run_plugin(access())


@pytest.mark.parametrize(("mode", "answer"), [("IfAvailable", "typed"), ("Always", "typed"), ("Never", "")])
def test_at_a_terminal_a_plugin_may_ask(tmp_path, mode, answer):
    plugin = script(
        tmp_path / "plugin",
        "echo 'who are you?' >&2",
        "read name",
        'echo "{\\"status\\": {\\"token\\": \\"t-$name\\"}}"',
    )
    entry = {"command": str(plugin), "interactiveMode": mode, "apiVersion": "client.authentication.k8s.io/v1"}
    path = write_kubeconfig(tmp_path / "config", "https://one", {"exec": entry})
    program = (
        "from windlass.targets.kubernetes.api.kubeconfig import access\n"
        "from windlass.targets.kubernetes.api.credentials import run_plugin\n"
        "print(run_plugin(access()).token)\n"
    )
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KUBECONFIG": str(path)},
    )
    os.write(ours, b"typed\n")
    out, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert out.strip() == f"t-{answer}"
    assert ("who are you?" in err) == (mode != "Never")


def test_plugins_that_are_not_well_formed(tmp_path, monkeypatch):
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    (tmp_path / "not-executable").write_text("x")
    for entry, words in (
        ({"args": []}, "names no command"),
        ({"command": "x", "env": [{"name": "A"}]}, "env a list of name and value"),
        ({"command": "x", "args": 7}, "args is a list"),
        ({"command": "./not-executable"}, "cannot be started"),
        ("text", "names no command"),
    ):
        write_kubeconfig(path, "https://one", {"exec": entry})
        with pytest.raises(UserError, match=words):
            run_plugin(access())


def test_an_old_token_serves_on_while_the_plugin_fails(server, connect, tmp_path):
    """A plugin that is called some time before the token expires may fail until then."""
    soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 40))
    plugin = script(
        tmp_path / "plugin",
        f"[ -e {tmp_path / 'offline'} ] && exit 1",
        printing(token="t", expirationTimestamp=soon),
    )
    server.on("/x", lambda handler: handler.json({"said": handler.headers["Authorization"]}))
    api = connect({"exec": {"command": str(plugin)}})
    (tmp_path / "offline").touch()
    assert api.get("/x") == {"said": "Bearer t"}


# -- certificates


def as_data(path):
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("certificate", ["file", "data"])
@pytest.mark.parametrize("key", ["file", "data"])
def test_a_certificate_and_its_key_are_given_as_files_or_as_data(tls_server, certificates, connect, certificate, key):
    user = {}
    for kind, how, path in (
        ("client-certificate", certificate, certificates / "first.crt"),
        ("client-key", key, certificates / "first.key"),
    ):
        user |= {kind: str(path)} if how == "file" else {f"{kind}-data": as_data(path), kind: "/not/there"}
    url = f"https://127.0.0.1:{tls_server.server_port}"
    api = connect(user, url, **{"certificate-authority": str(certificates / "ca.crt")})
    assert api.get("/whoami") == {"user": "first"}


def test_a_certificate_without_its_key_is_refused(connect, certificates):
    with pytest.raises(UserError, match="certificates of the context") as error:
        connect({"client-certificate": str(certificates / "first.crt")})
    assert "has no client-key" in error.value.evidence


def test_a_certificate_that_a_plugin_issues_is_renewed(tls_server, certificates, connect, tmp_path):
    """By its time, and when the server does not take it any more."""
    first, second = (
        printing(
            clientCertificateData=(certificates / f"{name}.crt").read_text(),
            clientKeyData=(certificates / f"{name}.key").read_text(),
            expirationTimestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)),
        )
        for name in ("first", "second")
    )
    plugin = script(tmp_path / "plugin", f"if [ -e {tmp_path / 'later'} ]; then {second}; else {first}; fi")
    refused = set()
    whoami = tls_server.answers["/whoami"][0]

    def guarded(handler):
        subject = dict(part[0] for part in handler.connection.getpeercert()["subject"])
        if subject["commonName"] in refused:
            handler.status(401, "Unauthorized", "Unauthorized")
        else:
            whoami(handler)

    tls_server.on("/whoami", guarded)
    url = f"https://127.0.0.1:{tls_server.server_port}"
    api = connect({"exec": {"command": str(plugin)}}, url, **{"certificate-authority": str(certificates / "ca.crt")})
    assert api.get("/whoami") == {"user": "first"}
    (tmp_path / "later").touch()
    assert api.get("/whoami") == {"user": "first"}
    refused.add("first")
    assert api.get("/whoami") == {"user": "second"}


def test_tls_is_verified_unless_it_is_said_as_yes(tls_server, connect):
    url = f"https://127.0.0.1:{tls_server.server_port}"
    with pytest.raises(UnreachableError):
        connect({}, url, **{"insecure-skip-tls-verify": "false"}).get("/whoami")
    assert connect({}, url, **{"insecure-skip-tls-verify": True}).get("/whoami") == {"user": None}


# -- kubectl's own logins


def jwt(seconds):
    body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + seconds}).encode()).decode().rstrip("=")
    return f"e30.{body}.sig"


def test_an_openid_token_is_used_while_it_is_good_and_read_again_when_kubectl_has_renewed_it(server, connect, tmp_path):
    user = lambda token: {"auth-provider": {"name": "oidc", "config": {"id-token": token}}}  # noqa: E731
    server.on("/x", lambda handler: handler.json({"said": handler.headers["Authorization"]}))
    good = jwt(600)
    assert connect(user(good)).get("/x") == {"said": f"Bearer {good}"}
    api = connect(user(jwt(-5)))
    with pytest.raises(UserError, match="has expired") as error:
        api.get("/x")
    assert "kubectl --context here version" in error.value.fix
    write_kubeconfig(tmp_path / "kubeconfig", server.url, user(good))
    assert api.get("/x") == {"said": f"Bearer {good}"}


@pytest.mark.parametrize(("name", "fix"), [("gcp", "gke-gcloud-auth-plugin"), ("azure", "kubelogin"), ("", "plugin")])
def test_logins_that_kubectl_has_given_up_are_named_with_what_came_after_them(server, connect, name, fix):
    api = connect({"auth-provider": {"name": name}})
    with pytest.raises(UserError, match="auth-provider") as error:
        api.get("/x")
    assert fix in error.value.fix
    assert not server.requests


# -- the way to the server


def test_a_socks_proxy_works_or_is_named_with_its_library(server, connect):
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = f"socks5://127.0.0.1:{listener.getsockname()[1]}"
    try:
        import socksio  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="SOCKS proxy") as error:
            connect({"token": "t"}, **{"proxy-url": proxy})
        assert error.value.fix == "pip install socksio"
        return
    finally:
        listener.close()
    with pytest.raises(UnreachableError):
        connect({"token": "t"}, **{"proxy-url": proxy}).get("/x")


@pytest.mark.parametrize(
    "cluster", [{"proxy-url": "ftp://x"}, {"proxy-url": "http://[::1"}, {"proxy-url": "http://a:b"}]
)
def test_a_proxy_that_is_none(connect, cluster):
    with pytest.raises(UserError, match="address"):
        connect({"token": "t"}, **cluster).get("/x")


PAGE = b"<html><title>Please log in</title></html>"


@pytest.mark.parametrize(
    ("content", "kind"), [(PAGE, "text/html"), (b"[]", "application/json"), (b"", "text/plain"), (b"[" * 99999, "x/y")]
)
def test_something_else_answers_in_the_place_of_the_api(server, connect, content, kind):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    server.on("/x", answer)
    api = connect({"token": "t"})
    with pytest.raises(UnreachableError, match="is not the Kubernetes API") as error:
        api.get("/x")
    assert len(server.requests) == 1
    if content is PAGE:
        assert "Please log in" in error.value.evidence
        with pytest.raises(UnreachableError, match="is not the Kubernetes API"):
            list(api.lines("/x", {"follow": "true"}))


def test_a_token_with_a_line_break_is_no_header(server, connect):
    with pytest.raises(UserError, match="characters that no token has"):
        connect({"token": "a\r\nX-Evil: 1"}).get("/x")
    assert not server.requests


# -- whatever the files hold

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("c") | st.just("here")
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
USER_KEYS = ("token", "auth-provider", "as", "as-groups", "as-user-extra", "client-certificate-data", "client-key-data")
CLUSTER_KEYS = ("server", "namespace", "proxy-url", "certificate-authority-data", "certificate-authority")
ENTRY_KEYS = st.sampled_from(("name", "context", "cluster", "user", *USER_KEYS, *CLUSTER_KEYS))
ENTRIES = st.dictionaries(ENTRY_KEYS, ANYTHING, max_size=5)
NAMED = st.one_of(
    *(
        st.fixed_dictionaries({"name": st.just(name) | ANYTHING, kind: ENTRIES | ANYTHING})
        for name, kind in (("here", "context"), ("c", "cluster"), ("ann", "user"))
    )
)
CONFIGS = st.fixed_dictionaries(
    {
        "current-context": st.just("here") | ANYTHING,
        "contexts": st.lists(NAMED, max_size=3) | ANYTHING,
        "clusters": st.lists(NAMED, max_size=3) | ANYTHING,
        "users": st.lists(NAMED, max_size=3) | ANYTHING,
    }
)
GOOD = {
    "current-context": "here",
    "contexts": [{"name": "here", "context": {"cluster": "c", "user": "ann"}}],
    "clusters": [{"name": "c", "cluster": {"server": "https://one"}}],
}


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(config=CONFIGS, user=ENTRIES, cluster=ENTRIES)
def test_fuzz_a_kubeconfig_is_read_or_refused_in_words(tmp_path_factory, config, user, cluster):
    path = tmp_path_factory.getbasetemp() / "fuzzed-config"
    users, clusters = [{"name": "ann", "user": user}], [{"name": "c", "cluster": cluster}]
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(UserError):
        patch.setenv("KUBECONFIG", str(path))
        path.write_text(json.dumps({**GOOD, "users": users, "clusters": clusters}))
        Api(access()).close()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(UserError):
        patch.setenv("KUBECONFIG", str(path))
        path.write_text(json.dumps(config))
        access()


@settings(deadline=None, max_examples=50)
@given(content=st.binary(max_size=60) | ANYTHING.map(lambda value: yaml.safe_dump(value).encode()))
@example(content=b"[" * 1100)
@example(content=b"&a [*a, *a]")
@example(content=b"\xff\xfe")
def test_fuzz_any_file_is_a_kubeconfig_or_refused_in_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzzed-config"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(path))
        with pytest.raises(UserError):
            access()


STATUS_KEYS = st.sampled_from(("token", "clientCertificateData", "clientKeyData", "expirationTimestamp"))


@settings(deadline=None, max_examples=60)
@given(
    text=st.text(max_size=40)
    | ANYTHING.map(json.dumps)
    | st.dictionaries(STATUS_KEYS, ANYTHING).map(lambda status: json.dumps({"status": status}))
)
@example(text='{"status": {"token": "t", "expirationTimestamp": "2999-01-01"}}')
@example(text="[" * 100_000)
def test_fuzz_what_a_plugin_prints_is_a_credential_or_none(text):
    answer = parse_answer(text)
    if answer is not None:
        assert answer.token or (answer.certificate and answer.key)
        assert isinstance(answer.seconds_left(), float)
