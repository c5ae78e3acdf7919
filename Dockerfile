# An image with smolcluster: docker build -t me/smolcluster .
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir /source && rm -rf /source
WORKDIR /runs
ENV SMOLCLUSTER_RUNS_DIR=/runs PYTHONUNBUFFERED=1
