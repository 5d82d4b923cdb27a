"""A server for tests that do not test its start."""

from benchmark.harness import server
from test.preloaded.interpreter import Popen


class Server(server.Server):
    """A server whose processes fork from one that has imported SGLang."""

    popen = Popen
