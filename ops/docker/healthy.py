"""Say by the exit status whether a server serves: for the health checks of containers.

    python healthy.py grpc 127.0.0.1:50051          grpc.health.v1, the whole server
    python healthy.py http 127.0.0.1:9464/readyz    any answer of 200

Standard library and, for grpc, what the model server's image has anyway.
"""

from __future__ import annotations

import http.client
import sys

TIMEOUT_S = 3.0


def grpc_serves(address: str) -> bool:
    """Ask the health service for the state of the whole server; raises `grpc.RpcError`."""
    # Only here: the check over HTTP runs often and starts in a fraction of the time without it.
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def http_ready(address: str) -> bool:
    """GET `HOST:PORT/PATH`; raises `OSError`."""
    host, _, path = address.partition("/")
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    connection.request("GET", f"/{path}")
    return connection.getresponse().status == http.client.OK


def main(arguments: list[str]) -> int:
    """Check once."""
    kind, address = arguments
    try:
        healthy = {"grpc": grpc_serves, "http": http_ready}[kind](address)
    except Exception as error:  # noqa: BLE001 - whatever it is, the container is not healthy
        print(f"{address}: {error}", file=sys.stderr)
        return 1
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
