"""scripts/jobset.yaml: its mesh, its restarts, and its command against fp4train's own parser."""

import re
from pathlib import Path
from typing import Any

import yaml
from configured import points_of

from fp4train.config import bind
from fp4train.parallel import Parallel

FILE = Path(__file__).parents[2] / "scripts" / "jobset.yaml"


def jobset() -> Any:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def job() -> Any:
    return jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]


def container() -> Any:
    return job()["template"]["spec"]["containers"][0]


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
