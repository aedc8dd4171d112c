"""The deployment files: valid by the tools of their trade, hardened, consistent with each other and with the commands.

Nothing is deployed here. What cannot be checked without a container engine, a cluster or a booted systemd is whether it
runs there; that the commands run is what the other tests are for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from controller.auth import parse_tokens
from policies.load import parse_policy
from policies.reload import PolicySet
from storage.access import ACL_RULES
from storage.embedded import EmbeddedServer
from storage.records import from_fields
from storage.stream import LeaseStore, StreamReader, StreamWriter, connect
from tests.support_cli import parse
from tests.support_storage import a_lease, a_request

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"
DOCKERFILES = sorted((OPS / "docker").glob("*.Dockerfile"))
UNITS = sorted((OPS / "systemd").glob("*.service"))
COMPOSE: dict[str, Any] = yaml.safe_load((OPS / "compose" / "compose.yaml").read_text())
CONFIGURATION = ROOT / "docs" / "configuration.md"


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((OPS / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


WORKLOADS = [
    (f"{name}:{d['kind']}", d["spec"]["template"]) for name, d in manifests() if "template" in d.get("spec", {})
]
CONTAINERS = [
    (f"{name}:{c['name']}", pod["spec"], c)
    for name, pod in WORKLOADS
    for c in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
]


# -- by the tools of their trade ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_dockerfiles_lint(path: Path) -> None:
    """hadolint, every rule, warnings included."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--failure-threshold", "info", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_finds_a_fault(tmp_path: Path) -> None:
    """Negative control."""
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /x && pip install lenity\n")
    hadolint = Path(sys.executable).with_name("hadolint")
    assert subprocess.run([hadolint, bad], capture_output=True, check=False).returncode == 1


def compose_schema() -> Any:
    text = (files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text()
    schema = json.loads(text)
    return jsonschema.validators.validator_for(schema)(schema)


def test_the_compose_file_follows_the_compose_specification() -> None:
    """The published JSON schema; a misspelt key is the negative control."""
    assert [e.message for e in compose_schema().iter_errors(COMPOSE)] == []
    broken = json.loads(json.dumps(COMPOSE))
    broken["services"]["controller"]["helthcheck"] = {}
    assert list(compose_schema().iter_errors(broken))


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_manifests_follow_the_schema_of_kubernetes(version: str) -> None:
    """Strictly: an unknown field is a fault. 1.29 is the first version with sidecars that start first."""
    seen = 0
    for _, document in manifests():
        if document["kind"] != "Kustomization":  # not a resource of the cluster
            kubernetes_validate.validate(document, version, strict=True)
            seen += 1
    assert seen >= 12
    broken = json.loads(json.dumps(next(d for _, d in manifests() if d["kind"] == "Deployment")))
    broken["spec"]["template"]["spec"]["automountServiceAcountToken"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.peer("systemd")
def test_units_verify(tmp_path: Path) -> None:
    """With a program that exists here in the place of ours; a misspelt setting is the negative control."""
    for unit in UNITS:
        text = unit.read_text()
        assert "ExecStart=/opt/lenity/bin/lenity " in text
        (tmp_path / unit.name).write_text(text.replace("/opt/lenity/bin/lenity", "/bin/true"))

    def verify(*paths: Path) -> str:
        done = subprocess.run(["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False)
        return f"{done.returncode} {done.stdout}{done.stderr}"

    assert verify(*sorted(tmp_path.glob("*.service"))) == "0 "
    bad = tmp_path / "bad.service"
    bad.write_text((tmp_path / UNITS[0].name).read_text().replace("PrivateTmp=", "PrivateTemp="))
    assert "PrivateTemp" in verify(bad)


@pytest.mark.peer("systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_are_locked_down(unit: Path) -> None:
    """systemd's own score of exposure, from 0 to 10; a unit without hardening has 9.6."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-400:]


# -- hardened ----------------------------------------------------------------------------------------------------------


def test_images_run_as_nobody_in_particular_and_say_whether_they_live() -> None:
    """A numeric user (so that Kubernetes can check it), a minor version of Python, a health check."""
    for path in DOCKERFILES:
        text = path.read_text()
        assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
        assert re.search(r"^ARG PYTHON=3\.\d+$", text, re.MULTILINE)
        assert "HEALTHCHECK" in text
    assert "torch" not in re.sub(r"#.*", "", (OPS / "docker" / "controller.Dockerfile").read_text())
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILES[0].read_text(), re.MULTILINE))
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {word for line in copied for word in line.split()} == allowed


@pytest.mark.parametrize(("name", "pod"), WORKLOADS, ids=[n for n, _ in WORKLOADS])
def test_pods_have_no_account_no_root_and_no_foreign_variables(name: str, pod: dict[str, Any]) -> None:
    """No token of the cluster's API; the variables of services would be taken for options."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(d["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") for _, d in manifests())


@pytest.mark.parametrize(("name", "spec", "container"), CONTAINERS, ids=[n for n, _, _ in CONTAINERS])
def test_containers_are_locked_bounded_and_probed(name: str, spec: dict[str, Any], container: dict[str, Any]) -> None:
    """Read-only, no capability, memory limited; every mount names a volume; every probe asks a port that is there."""
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["memory"]
    volumes = {v["name"] for v in spec["volumes"]} | {"history"}
    assert {m["name"] for m in container["volumeMounts"]} <= volumes
    ports = {p["name"] for p in container.get("ports", [])}
    probes = {k: v for k, v in container.items() if k.endswith("Probe")}
    assert "startupProbe" in probes
    for probe in probes.values():
        asked = probe.get("httpGet") or probe.get("tcpSocket")
        assert asked is None or asked["port"] in ports
    if container["name"] == "controller" and "sidecar" not in name:
        assert probes["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_services_budgets_and_network_policies_select_pods_that_exist() -> None:
    """By labels."""
    labels = [pod["metadata"]["labels"] for _, pod in WORKLOADS]
    for name, d in manifests():
        spec = d.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", {} if "matchLabels" in selector else selector)
        if d["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy") and wanted:
            assert any(wanted.items() <= have.items() for have in labels), (name, d["metadata"]["name"])
    listed = yaml.safe_load((OPS / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert all((OPS / "kubernetes" / file).is_file() for file in listed)


def test_compose_services_are_limited_watched_and_locked() -> None:
    """Memory, a health check, no new privileges, ports on the loopback interface only, images with a version."""
    for name, service in COMPOSE["services"].items():
        assert service["deploy"]["resources"]["limits"]["memory"], name
        built = "build" in service
        assert built or "healthcheck" in service, name
        assert built or re.search(r":v?\d", service["image"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert name == "postgres" or service["read_only"] is True, name
    assert COMPOSE["services"]["controller"]["deploy"]["replicas"] == 2


def test_what_compose_mounts_is_there() -> None:
    """Relative paths; the secrets are those that the script makes (below)."""
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (OPS / "compose" / source).exists(), (name, source)
        if "build" in service:
            context = (OPS / "compose" / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ops/compose/make_secrets.sh makes."""
    directory = tmp_path_factory.mktemp("ops") / "secrets"
    subprocess.run([OPS / "compose" / "make_secrets.sh", directory], check=True, capture_output=True)
    return directory


def test_every_secret_of_the_compose_file_is_made_once(secrets: Path) -> None:
    """In a directory that only its owner may enter; a second run changes nothing."""
    named = {Path(s["file"]).name for s in COMPOSE["secrets"].values()}
    assert {p.name for p in secrets.iterdir()} == named | {"operator_token"}
    assert named == set(COMPOSE["secrets"])
    assert (secrets / "operator_token").read_text() in (secrets / "api_tokens").read_text()
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    before = (secrets / "api_tokens").read_text()
    again = subprocess.run([OPS / "compose" / "make_secrets.sh", secrets], capture_output=True, check=False)
    assert again.returncode == 1
    assert (secrets / "api_tokens").read_text() == before
    used = {s for service in COMPOSE["services"].values() for s in service.get("secrets", [])}
    assert used == named
    assert "/ops/compose/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_tokens_of_the_examples_are_read(secrets: Path) -> None:
    """The made one, and the form in the Secret."""
    assert [i.role for i in parse_tokens((secrets / "api_tokens").read_text(), "x").values()] == ["operator"]
    example = next(d for n, d in manifests() if d["kind"] == "Secret" and "tokens" in d["stringData"])
    assert [i.name for i in parse_tokens(example["stringData"]["tokens"], "x").values()] == ["on-call"]


def test_stream_users_can_do_their_work_and_workers_cannot_write_leases(secrets: Path, valkey: EmbeddedServer) -> None:
    """The users of the compose file on a real server, over everything that either side does."""
    admin = connect(valkey.url)
    lines = (secrets / "valkey_users").read_text().splitlines()
    for name in ("controller", "worker"):
        assert any(line.startswith(f"user {name} on #") and ACL_RULES[name] in line for line in lines)
    pool = "acl"
    try:
        for line in lines:
            _, name, *rules = line.split()
            if name != "default":
                admin.execute_command("ACL", "SETUSER", name, "reset", *rules)

        def as_user(name: str) -> Any:
            words = re.search(rf"//({name}:\w+)@", (secrets / f"redis_url_{name}").read_text())
            assert words
            return connect(valkey.url.replace("unix://", f"unix://{words[1]}@"))

        controller, worker = as_user("controller"), as_user("worker")
        reader, leases = StreamReader(controller, pool), LeaseStore(controller)
        reader.read()
        StreamWriter(worker, pool).append([a_request(pool)])
        ((entry, fields),) = reader.read()
        assert from_fields(fields) == a_request(pool)
        reader.lag()
        reader.dead_letter(entry, fields, "because")
        reader.ack([entry])
        lease = a_lease(pool)
        leases.write(lease)
        found = LeaseStore(worker).read(pool, lease.traffic_class)
        assert found is not None
        assert found[0] == lease
        for forbidden in (
            lambda: worker.set(f"lenity:{{{pool}}}:lease:default", "x"),
            lambda: worker.eval("return redis.call('DEL', KEYS[1])", 1, f"lenity:{{{pool}}}:lease:default"),
            lambda: worker.delete(f"lenity:{{{pool}}}:lease:default"),
            lambda: worker.xrange(f"lenity:{{{pool}}}:telemetry"),
            worker.flushall,
            controller.flushall,
            lambda: controller.get("somebody:else"),
        ):
            with pytest.raises(Exception, match=r"(?i)permission"):
                forbidden()
        controller.close()
        worker.close()
    finally:
        for line in lines:
            if line.split()[1] != "default":
                admin.execute_command("ACL", "DELUSER", line.split()[1])
        for key in admin.keys(f"lenity:{{{pool}}}:*"):
            admin.delete(key)
        admin.close()


# -- the commands ------------------------------------------------------------------------------------------------------


def _json_line(text: str, word: str) -> list[str]:
    found = re.findall(rf"^{word} (\[.*\])$", text, re.MULTILINE)
    return list(json.loads(found[-1]))


def _image_variables(dockerfile: str) -> dict[str, str]:
    text = (OPS / "docker" / dockerfile).read_text().replace("\\\n", " ")
    return dict(re.findall(r"\b(LENITY_\w+)=(\S+)", text))


def _command_lines() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Where, words after `lenity`, and variables, of every command that a deployment file runs."""
    for path in DOCKERFILES:
        text = path.read_text()
        assert _json_line(text, "ENTRYPOINT") == ["lenity"]
        yield path.name, _json_line(text, "CMD"), _image_variables(path.name)
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            image = _image_variables(Path(service["build"]["dockerfile"]).name)
            yield f"compose:{name}", service["command"], image | service["environment"]
    for name, _, container in CONTAINERS:
        if container["image"].startswith("lenity-"):
            image = _image_variables(container["image"].split(":")[0].removeprefix("lenity-") + ".Dockerfile")
            given = {e["name"]: e.get("value", "a-name") for e in container.get("env", [])}
            yield name, container["args"], image | given
    for path in UNITS:
        text = path.read_text()
        (line,) = re.findall(r"^ExecStart=\S+/lenity (.*)$", text, re.MULTILINE)
        yield path.name, shlex.split(line), dict(re.findall(r"^Environment=(LENITY_\w+)=(.*)$", text, re.MULTILINE))


COMMAND_LINES = list(_command_lines())


@pytest.mark.parametrize(("where", "words", "variables"), COMMAND_LINES, ids=[w for w, _, _ in COMMAND_LINES])
def test_deployed_commands_parse(
    where: str, words: list[str], variables: dict[str, str], tmp_path: Path, secrets: Path
) -> None:
    """Against the real command line, with the variables and files that the deployment gives."""
    given = dict(variables)
    if where.endswith("Dockerfile"):  # what an image cannot know
        given |= {"LENITY_CONTROLLER_POLICY": "/p", "LENITY_REDIS_URL": "redis://x"}
    given.setdefault("LENITY_CONTROLLER_POLICY", "") if where.endswith("service") else None
    url = tmp_path / "url"
    url.write_text((secrets / "redis_url_worker").read_text())
    for name, value in given.items():
        if name.endswith("_URL_FILE"):
            assert re.match(r"/run/secrets/|/etc/lenity/secret/|%d/", value), (where, name)
            given[name] = str(url)
    words = [
        str(OPS / "systemd" / Path(w).name) if w.startswith("/etc/lenity/") and w.endswith(".yaml") else w
        for w in words
    ]
    name, values = parse(words, given)
    assert name in ("controller", "worker")
    assert str(values["redis_url"]).startswith(("redis://", "unix://"))
    if "serve" in values:
        assert (values["serve"] is None) != (values["traffic"] is None), where


def test_a_deployed_command_with_a_fault_does_not_parse() -> None:
    """Negative control: a misspelt flag and a misspelt variable."""
    with pytest.raises(AssertionError, match="--polcy"):
        parse(["controller", "--polcy", "x"])
    with pytest.raises(AssertionError, match="LENITY_CONTROLLER_POLCY"):
        parse(["controller", "--policy", "x"], {"LENITY_CONTROLLER_POLCY": "x"})


def test_every_variable_in_a_deployment_file_is_documented() -> None:
    """In the table of docs/configuration.md; NAME_FILE counts as NAME."""
    documented = set(re.findall(r"`(LENITY_\w+)`", CONFIGURATION.read_text()))
    for path in OPS.rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".yml", ".service", ".Dockerfile", ".sh"):
            for name in re.findall(r"\bLENITY_[A-Z_]+\b", path.read_text()):
                assert {name, name.removesuffix("_FILE")} & documented, (path.name, name)


def test_every_file_of_ours_in_a_deployment_file_is_documented() -> None:
    """By its path, or its directory and its name, on the configuration page."""
    page = CONFIGURATION.read_text()
    for path in OPS.rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".service", ".Dockerfile"):
            for name in re.findall(
                r"(?:/etc/lenity|/run/secrets|/srv/models|/var/lib/lenity)[\w/.-]*", path.read_text()
            ):
                file = Path(name.rstrip("."))
                where = f"`{file}`" in page or (f"`{file.parent}`" in page and f"`{file.name}`" in page)
                assert where or file.suffix == ".db", (path.name, name)


def test_deployed_policies_are_good() -> None:
    """Those of the compose file and of the ConfigMap."""
    policies = PolicySet([OPS / "compose" / "policies"])
    assert set(policies.files) == {"demo"}
    config_map = next(d for _, d in manifests() if d["kind"] == "ConfigMap")
    for key, text in config_map["data"].items():
        assert parse_policy(text, key).pool == Path(key).stem
    assert all(os.access(OPS / "compose" / name, os.X_OK) for name in ("make_secrets.sh",))
