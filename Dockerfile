# An image with smolcluster: docker build -t me/smolcluster .
FROM python:3.12.12-slim-bookworm
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
RUN pip install --no-cache-dir /source && rm -rf /source
# Nobody needs to be root in it: mount what this user may write, or run with a user of your own (--user, runAsUser).
RUN useradd --create-home --uid 1000 smolcluster && mkdir /runs && chown smolcluster /runs
USER smolcluster
WORKDIR /runs
ENV SMOLCLUSTER_RUNS_DIR=/runs PYTHONUNBUFFERED=1
