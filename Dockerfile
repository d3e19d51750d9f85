# fp4train on a GPU machine, on NVIDIA's PyTorch image, which brings PyTorch, CUDA and Transformer Engine built for
# each other. None of the three is replaced here: pip sees every dependency of the project but torch.
#
#   docker build -t fp4train .
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" -v "$PWD:/project" fp4train experiment=llama_125m_fineweb
#
# The folder that is mounted gets what the container writes, as the user who starts it: ./runs, and in ./.fp4train the
# cache of tokens and the key that signs configurations, which the next container finds again.
#
#   docker run --rm --gpus all --entrypoint bash fp4train /opt/fp4train/scripts/gpu_check.sh gpu te
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

# Any user may write here where no folder is mounted. A user that the image does not know has no name: torch asks for one.
RUN useradd --create-home --shell /bin/bash fp4train && mkdir -p /project && chown fp4train /project && chmod 1777 /project
ENV HOME=/project/.fp4train USER=fp4train LOGNAME=fp4train
USER fp4train
WORKDIR /project
ENTRYPOINT ["fp4train"]
