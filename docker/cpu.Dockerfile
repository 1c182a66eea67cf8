# ark on a CPU: docker build -f docker/cpu.Dockerfile -t ark . && docker run --rm ark info
FROM python:3.12-slim-bookworm
WORKDIR /opt/ark
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[cpu]" && useradd --create-home --uid 1000 ark
USER 1000
WORKDIR /home/ark
ENTRYPOINT ["ark"]
CMD ["info"]
