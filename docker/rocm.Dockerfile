# ark on AMD GPUs; the host's kernel driver is used:
# docker build -f docker/rocm.Dockerfile -t ark-rocm .
# docker run --rm --device /dev/kfd --device /dev/dri --group-add video ark-rocm doctor
FROM rocm/dev-ubuntu-24.04:7.0-complete
RUN apt-get update \
    && apt-get install --no-install-recommends -y python3-venv=3.12.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 --groups video ark
WORKDIR /opt/ark
COPY . .
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir ".[rocm]"
ENV PATH=/opt/venv/bin:$PATH
USER 1001
WORKDIR /home/ark
ENTRYPOINT ["ark"]
CMD ["info"]
