# The daemon, or the receiver with `receiver` as the command. No torch in it: the exporter runs in the training's own image.
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.11-slim-bookworm
COPY --from=wheel /wheel /src/constraints.txt /tmp/wheel/
RUN pip install --no-cache-dir --constraint /tmp/wheel/constraints.txt /tmp/wheel/*.whl \
 && rm -r /tmp/wheel \
 && useradd --system --uid 10001 --create-home --home-dir /var/lib/trainwarden trainwarden
USER 10001
# For the database (`state: /var/lib/trainwarden/trainwarden.db`): mount a volume here.
WORKDIR /var/lib/trainwarden
EXPOSE 17080
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:17080/-/healthy', timeout=3)"]
ENTRYPOINT ["trainwarden"]
CMD ["run", "--config", "/etc/trainwarden/trainwarden.yml"]
