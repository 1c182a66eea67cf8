# ark on NVIDIA GPUs; the host's driver is used:
# docker build -f docker/cuda.Dockerfile -t ark-cuda . && docker run --rm --gpus all ark-cuda doctor
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
RUN apt-get update \
    && apt-get install --no-install-recommends -y python3-venv=3.12.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 ark
WORKDIR /opt/ark
COPY . .
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir ".[cuda,cpu]"
ENV PATH=/opt/venv/bin:$PATH
USER 1001
WORKDIR /home/ark
ENTRYPOINT ["ark"]
CMD ["info"]
