"""scripts/jobset.yaml against the parts of the API that it uses, and its command against fp4train's own parser."""

import re
from pathlib import Path
from typing import Any

import pytest
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
    if isinstance(schema, str):
        return (
            [] if isinstance(value, str) and re.fullmatch(schema, value) else [f"{where}={value!r}"]
        )
    if isinstance(schema, type):
        fits = isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
        return [] if fits else [f"{where}={value!r} is not {schema.__name__}"]
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{where} is not a list"]
        return [
            problem
            for n, each in enumerate(value)
            for problem in wrong(each, schema[0], f"{where}[{n}]")
        ]
    if not isinstance(value, dict):
        return [f"{where} is not a mapping"]
    kinds = {key.rstrip("!"): kind for key, kind in schema.items()}
    found = [
        f"{where}.{key[:-1]} is missing"
        for key in schema
        if key.endswith("!") and key[:-1] not in value
    ]
    for key, each in value.items():
        found += (
            wrong(each, kinds[key], f"{where}.{key}")
            if key in kinds
            else [f"{where}.{key} is unknown"]
        )
    return found


def jobset() -> Any:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def container() -> Any:
    return jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]


def test_it_fits_the_api() -> None:
    assert wrong(jobset(), SCHEMA) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("completionMode: Indexed", "completionMode: NonIndexed", "completionMode"),
        ("replicatedJobs:", "replicatedJob:", ".spec.replicatedJobs is missing"),
        ('value: "29500"', "value: 29500", "is not str"),
        ("backoffLimit:", "backofLimit:", "backofLimit is unknown"),
        ("name: fp4train", "name: FP4_train", "metadata.name"),
    ],
)
def test_a_slip_in_it_would_be_found(old: str, new: str, said: str) -> None:
    assert any(
        said in problem
        for problem in wrong(yaml.safe_load(FILE.read_text().replace(old, new)), SCHEMA)
    )


def test_its_pods_find_the_first_of_them_and_make_the_ranks_of_its_mesh() -> None:
    body = jobset()
    (kind,) = body["spec"]["replicatedJobs"]
    job = kind["template"]["spec"]
    pod = container()
    environment = {each["name"]: each.get("value") for each in pod["env"]}
    subdomain = body["spec"]["network"]["subdomain"]
    assert body["spec"]["network"]["enableDNSHostnames"] is True
    assert (
        environment["MASTER_ADDR"] == f"{body['metadata']['name']}-{kind['name']}-0-0.{subdomain}"
    )
    assert int(environment["MASTER_PORT"]) == pod["ports"][0]["containerPort"]
    options = dict(
        word.removeprefix("--").split("=") for word in pod["command"] if word.startswith("--")
    )
    assert set(re.findall(r"\$\((\w+)\)", " ".join(options.values()))) <= set(environment)
    gpus = pod["resources"]["limits"]["nvidia.com/gpu"]
    assert (
        job["completions"] == job["parallelism"] == int(options["nnodes"])
        and int(options["nproc-per-node"]) == gpus
    )
    given = dict(word.split("=", 1) for word in pod["args"])
    mesh = {
        key.partition(".")[2]: int(value)
        for key, value in given.items()
        if key.startswith("parallel.")
    }
    ranks = job["completions"] * gpus
    bind({"_target_": "fp4train.parallel.config.Parallel", **mesh}, Parallel, "parallel").mesh(
        ranks
    )
    assert int(given["train.batch_size"]) % ranks == 0
    grace = job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace, (
        "ranks save before the pod is killed"
    )
    volumes = {each["name"] for each in job["template"]["spec"]["volumes"]}
    assert volumes == {each["name"] for each in pod["volumeMounts"]}
    assert given["data.path"].startswith(f"{pod['workingDir']}/"), "the data lie on the volume"


def test_evictions_do_not_use_up_its_restarts() -> None:
    """The evicted pod fails its Job with a reason of its own, also where the other pods have ended
    before it.
    """
    body = jobset()["spec"]
    (rule,) = body["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and rule[
        "onJobFailureReasons"
    ] == ["PodFailurePolicy"]
    job = body["replicatedJobs"][0]["template"]["spec"]
    (evicted,) = job["podFailurePolicy"]["rules"]
    assert (
        evicted["action"] == "FailJob"
        and evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    )
    assert (
        job["backoffLimit"] == job["completions"] - 1
        and job["template"]["spec"]["restartPolicy"] == "Never"
    )


def test_it_says_which_network_ranks_take_and_how_to_ask_for_rdma() -> None:
    named = {each["name"] for each in container()["env"]}
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= named and "rdma/" in FILE.read_text(
        encoding="utf-8"
    )


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
