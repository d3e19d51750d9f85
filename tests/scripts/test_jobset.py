"""scripts/jobset.yaml against the parts of the API that it uses, and its command against fp4train's own parser."""

import re
from pathlib import Path
from typing import Any

import yaml
from configured import points_of

from fp4train.config import bind
from fp4train.parallel import Parallel

FILE = Path(__file__).parents[2] / "scripts" / "jobset.yaml"
NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

CONTAINER: dict[str, Any] = {
    "name!": NAME,
    "image!": str,
    "workingDir": str,
    "env": [{"name!": r"[A-Z_]+", "value": str, "valueFrom": {"fieldRef!": {"fieldPath!": str}}}],
    "command!": [str],
    "args!": [str],
    "ports": [{"containerPort!": int}],
    "resources!": {"limits!": {"nvidia.com/gpu!": int, "rdma/hca": int}},
    "volumeMounts": [{"name!": NAME, "mountPath!": r"/.*"}],
}
POD = {
    "restartPolicy!": "Never|OnFailure",
    "terminationGracePeriodSeconds": int,
    "containers!": [CONTAINER],
    "volumes": [
        {
            "name!": NAME,
            "persistentVolumeClaim": {"claimName!": NAME},
            "emptyDir": {"medium": "Memory", "sizeLimit": str},
        }
    ],
}
JOB = {
    "parallelism!": int,
    "completions!": int,
    "completionMode!": "Indexed",
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": "FailJob|Ignore|Count",
                "onPodConditions": [{"type!": "DisruptionTarget", "status!": "True"}],
            }
        ]
    },
    "template!": {"metadata": dict, "spec!": POD},
}
SCHEMA = {
    "apiVersion!": r"jobset\.x-k8s\.io/v1alpha2",
    "kind!": "JobSet",
    "metadata!": {
        "name!": NAME,
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": r"[\w.-]+/[\w.-]+"},
    },
    "spec!": {
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": NAME,
            "publishNotReadyAddresses": bool,
        },
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [
                {
                    "action!": "FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": [
                        "BackoffLimitExceeded|DeadlineExceeded|PodFailurePolicy"
                    ],
                }
            ],
        },
        "replicatedJobs!": [
            {"name!": NAME, "replicas": int, "template!": {"metadata": dict, "spec!": JOB}}
        ],
    },
}
"""From JobSet's v1alpha2 types, Kubernetes' batch/v1 Job and core/v1 PodSpec: "key!" is required; a
text is a pattern; other keys are refused, as the API server refuses them under strict validation.
"""


def wrong(value: Any, schema: Any, where: str = "") -> list[str]:
    """What of `value` does not fit."""
    if isinstance(schema, dict) and isinstance(value, dict):
        kinds = {key.rstrip("!"): kind for key, kind in schema.items()}
        missing = {key[:-1] for key in schema if key.endswith("!")} - set(value)
        problems = [f"{where}.{key} is missing" for key in missing]
        problems += [f"{where}.{key} is unknown" for key in value if key not in kinds]
        for key in kinds.keys() & value.keys():
            problems += wrong(value[key], kinds[key], f"{where}.{key}")
        return problems
    if isinstance(schema, list) and isinstance(value, list) and value:
        return [problem for item in value for problem in wrong(item, schema[0], where)]
    if isinstance(schema, type):
        fits = type(value) is schema
    else:
        fits = isinstance(schema, str) and bool(re.fullmatch(schema, str(value)))
    return [] if fits else [f"{where}={value!r}"]


def jobset() -> Any:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def job() -> Any:
    return jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]


def container() -> Any:
    return job()["template"]["spec"]["containers"][0]


def test_it_fits_the_api() -> None:
    assert wrong(jobset(), SCHEMA) == []


def test_a_slip_in_it_would_be_found() -> None:
    text = FILE.read_text().replace("backoffLimit:", "backofLimit:")
    assert any(
        "backofLimit is unknown" in problem for problem in wrong(yaml.safe_load(text), SCHEMA)
    )


def test_its_pods_find_the_first_of_them_and_make_the_ranks_of_its_mesh() -> None:
    body = jobset()
    pod = container()
    environment = {variable["name"]: variable.get("value") for variable in pod["env"]}
    network = body["spec"]["network"]
    first = f"{body['metadata']['name']}-{body['spec']['replicatedJobs'][0]['name']}-0-0"
    assert network["enableDNSHostnames"] is True
    assert environment["MASTER_ADDR"] == f"{first}.{network['subdomain']}"
    assert int(environment["MASTER_PORT"]) == pod["ports"][0]["containerPort"]
    options = dict(word[2:].split("=") for word in pod["command"] if word.startswith("--"))
    assert set(re.findall(r"\$\((\w+)\)", " ".join(options.values()))) <= set(environment)
    pods = job()["completions"]
    gpus = pod["resources"]["limits"]["nvidia.com/gpu"]
    assert pods == job()["parallelism"] == int(options["nnodes"])
    assert int(options["nproc-per-node"]) == gpus
    keys = dict(word.split("=", 1) for word in pod["args"])
    sizes = {
        key.removeprefix("parallel."): int(value)
        for key, value in keys.items()
        if key.startswith("parallel.")
    }
    parallel = {"_target_": "fp4train.parallel.config.Parallel", **sizes}
    bind(parallel, Parallel, "parallel").mesh(pods * gpus)
    assert int(keys["train.batch_size"]) % (pods * gpus) == 0
    grace = job()["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace, "ranks save before it ends"
    assert keys["data.path"].startswith(f"{pod['workingDir']}/"), "the data lie on the volume"


def test_evictions_do_not_use_up_its_restarts() -> None:
    """The evicted pod fails its Job with a reason of its own, also where the other pods have ended
    before it.
    """
    (rule,) = jobset()["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    (evicted,) = job()["podFailurePolicy"]["rules"]
    assert evicted["action"] == "FailJob"
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert job()["backoffLimit"] == job()["completions"] - 1


def test_its_command_is_one_that_torchrun_and_fp4train_read() -> None:
    from torch.distributed.run import get_args_parser

    pod = container()
    program, *words = pod["command"]
    assert program == "torchrun"
    read = get_args_parser().parse_args(
        [re.sub(r"\$\(\w+\)", "0", word) for word in (*words, *pod["args"])]
    )
    assert (
        read.module
        and read.training_script == "fp4train"
        and read.training_script_args == pod["args"]
    )
    assert points_of(pod["args"])
