# fp4train on a GPU machine, on NVIDIA's PyTorch image, which brings PyTorch, CUDA and Transformer Engine built for
# each other. None of the three is replaced here: pip sees every dependency of the project but torch.
#
#   docker build -t fp4train .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/home/fp4train/runs" fp4train recipe=nvfp4 model=llama_125m
#   docker run --rm --gpus all --entrypoint python fp4train /opt/fp4train/scripts/te_selfcheck.py
#
# Any image of the series with Transformer Engine 2.14 or newer does (2.19 for single GEMMs in high precision beside
# quantised ones); the build stops on an older one, as on a torch that is too old.
ARG IMAGE=nvcr.io/nvidia/pytorch:26.10-py3
FROM ${IMAGE}

WORKDIR /opt/fp4train
COPY pyproject.toml ./
RUN python - <<'CHECK' > requirements.txt
import re, sys, tomllib
from importlib.metadata import version

def numbers(text):
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])

dependencies = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
(torch,) = [line for line in dependencies if re.match(r"torch\b", line)]
for package, least in (("torch", torch.partition(">=")[2]), ("transformer_engine", "2.14")):
    found = version(package)
    if numbers(found) < numbers(least):
        sys.exit(f"this image has {package} {found}; fp4train needs {least} or newer: build with --build-arg IMAGE=...")
print(*(line for line in dependencies if line != torch), sep="\n")
CHECK
# The image's own constraint file keeps pip from touching what the image was built with.
RUN pip install --no-cache-dir -r requirements.txt && rm requirements.txt

COPY . .
# Without dependencies nothing but this project is installed, so the image's constraints need not reach the build tools.
RUN PIP_CONSTRAINT= pip install --no-cache-dir --no-deps . && rm -rf build

RUN useradd --create-home --shell /bin/bash fp4train && mkdir -p /home/fp4train/runs && chown fp4train /home/fp4train/runs
USER fp4train
WORKDIR /home/fp4train
ENTRYPOINT ["fp4train"]
