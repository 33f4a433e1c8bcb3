from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client.registry import Collector, CollectorRegistry

REGISTRY: CollectorRegistry

def start_http_server(port: int, addr: str = "0.0.0.0", registry: Collector = ...) -> tuple[WSGIServer, Thread]: ...
